BEGIN TRANSACTION;
CREATE TABLE intents (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    at REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "intents" VALUES('in_1','fork','{}',1.0);
CREATE TABLE replies (
    request_id TEXT NOT NULL,
    uid INTEGER NOT NULL,
    verb TEXT NOT NULL,
    body BLOB NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (request_id, uid, verb)
) WITHOUT ROWID;
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    box TEXT,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    parent TEXT,
    template TEXT,
    snapshot TEXT,
    checkpoint TEXT,
    resume TEXT,
    layers TEXT,
    labels TEXT,
    lease TEXT,
    ephemeral INTEGER,
    deadline REAL,
    boot_id TEXT,
    created_at REAL NOT NULL,
    expires_at REAL,
    saved_at REAL NOT NULL,
    doc BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT,
    sandbox TEXT,
    parent TEXT,
    layers TEXT,
    image TEXT,
    engine TEXT,
    verified INTEGER,
    created_at REAL NOT NULL,
    saved_at REAL NOT NULL,
    doc BLOB NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX live_names ON sandboxes (name) WHERE state <> 'deleted';
CREATE INDEX sandboxes_by_snapshot ON sandboxes (snapshot) WHERE state <> 'deleted';
CREATE UNIQUE INDEX snapshot_names ON snapshots (name) WHERE kind = 'snapshot' AND name IS NOT NULL;
CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox);
CREATE INDEX replies_by_age ON replies (at);
COMMIT;
PRAGMA user_version = 1;

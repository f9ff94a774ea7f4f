BEGIN TRANSACTION;
CREATE TABLE replies (
    request_id TEXT NOT NULL,
    uid INTEGER NOT NULL,
    verb TEXT NOT NULL,
    body BLOB NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (request_id, uid, verb)
) WITHOUT ROWID;
INSERT INTO "replies" VALUES('req_1',0,'fork',CAST('{"n":1}' AS BLOB),1.0);
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
INSERT INTO "sandboxes" VALUES('sb_007bg0ge5y','bxh94h19a8jc','gone','deleted',NULL,'base',NULL,NULL,NULL,'["base"]','{}',NULL,0,NULL,'boot-of-then',1.79604395982625603678e+09,NULL,1.79604395983248734478e+09,CAST('{"id":"sb_007bg0ge5y","name":"gone","state":"deleted","engine":"fake","template":"base","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"user":"user","workdir":"/home/user","created_at":1796043959.826256,"boot_id":"boot-of-then","start_ms":3.3,"box":"bxh94h19a8jc","layers":["base"],"origin":["base"],"machine":{"pid":5,"start_time":5,"boot_id":"boot-of-then"},"agent":"d08e4c760a57751d","generation":1,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256}' AS BLOB));
INSERT INTO "sandboxes" VALUES('sb_62hja7ddqg','bxgy0cyj62tr','one','running',NULL,'base',NULL,'ck_s64r3sc51p',NULL,'["base"]','{"k":"v"}',NULL,0,1.80004076332847571372e+09,'boot-of-then',1.79604395956542873388e+09,3.59604395956564521787e+09,1.79604395973136568066e+09,CAST('{"id":"sb_62hja7ddqg","name":"one","state":"running","engine":"fake","template":"base","checkpoint":"ck_s64r3sc51p","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"user":"user","workdir":"/home/user","labels":{"k":"v"},"ttl_min":30000000,"created_at":1796043959.5654287,"expires_at":3596043959.565645,"deadline":1800040763.3284757,"boot_id":"boot-of-then","tainted":true,"start_ms":37.31,"box":"bxgy0cyj62tr","layers":["base"],"origin":["base"],"machine":{"pid":1,"start_time":1,"boot_id":"boot-of-then"},"agent":"d08e4c760a57751d","generation":1,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256}' AS BLOB));
INSERT INTO "sandboxes" VALUES('sb_ddk3zzpe2a','bxbwmydhcw4y','child','running','sb_62hja7ddqg','base','a84b8218-7869-4d0d-ad94-295df9102c17',NULL,NULL,'["s-a84b8218-7869-4d0d-ad94-295df9102c17","base"]','{"k":"v"}',NULL,0,1.80004076351172256466e+09,'boot-of-then',1.79604395974887490273e+09,3.59604395974889373775e+09,1.79604395975450110436e+09,CAST('{"id":"sb_ddk3zzpe2a","name":"child","state":"running","engine":"fake","template":"base","snapshot":"a84b8218-7869-4d0d-ad94-295df9102c17","parent":"sb_62hja7ddqg","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"user":"user","workdir":"/home/user","labels":{"k":"v"},"ttl_min":30000000,"created_at":1796043959.748875,"expires_at":3596043959.7488937,"deadline":1800040763.5117226,"boot_id":"boot-of-then","memory_restored":true,"tainted":true,"start_ms":4.41,"box":"bxbwmydhcw4y","layers":["s-a84b8218-7869-4d0d-ad94-295df9102c17","base"],"origin":["s-a84b8218-7869-4d0d-ad94-295df9102c17","base"],"machine":{"pid":3,"start_time":3,"boot_id":"boot-of-then"},"agent":"d08e4c760a57751d","generation":1,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256}' AS BLOB));
INSERT INTO "sandboxes" VALUES('sb_te53w0grt1','','stopped','stopped','sb_62hja7ddqg','base','6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f',NULL,'d9dcc253-bee0-476d-b17e-552bfd52a67c','["s-d9dcc253-bee0-476d-b17e-552bfd52a67c","s-6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","base"]','{}',NULL,0,NULL,'boot-of-then',1.79604395980659270288e+09,NULL,1.79604395981936931607e+09,CAST('{"id":"sb_te53w0grt1","name":"stopped","state":"stopped","engine":"fake","template":"base","snapshot":"6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","parent":"sb_62hja7ddqg","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"user":"user","workdir":"/home/user","created_at":1796043959.8065927,"boot_id":"boot-of-then","resumed_from":"gold","memory_restored":true,"tainted":true,"start_ms":5.62,"layers":["s-d9dcc253-bee0-476d-b17e-552bfd52a67c","s-6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","base"],"origin":["s-6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","base"],"agent":"d08e4c760a57751d","resume":"d9dcc253-bee0-476d-b17e-552bfd52a67c","generation":1,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256}' AS BLOB));
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
INSERT INTO "snapshots" VALUES('6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f','snapshot','gold','sb_62hja7ddqg','ck_s64r3sc51p','["s-6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","base"]','6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f','fake',0,1.7960439597587938309e+09,1.79604395975937700278e+09,CAST('{"id":"6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","kind":"snapshot","sandbox":"sb_62hja7ddqg","name":"gold","parent":"ck_s64r3sc51p","labels":{"s":"1"},"layers":["s-6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","base"],"image":"6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","fingerprint":"fake/1","agent":"d08e4c760a57751d","engine":"fake","size_bytes":37474,"memory_bytes":610,"created_at":1796043959.7587938,"paused_ms":2.48,"dirty_mb":0.0,"inherits":{"template":"base","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256,"user":"user","workdir":"/home/user","env":{},"tainted":true}}' AS BLOB));
INSERT INTO "snapshots" VALUES('a84b8218-7869-4d0d-ad94-295df9102c17','fork',NULL,'sb_62hja7ddqg','ck_s64r3sc51p','["s-a84b8218-7869-4d0d-ad94-295df9102c17","base"]','a84b8218-7869-4d0d-ad94-295df9102c17','fake',0,1.79604395974777340892e+09,1.79604395974813246727e+09,CAST('{"id":"a84b8218-7869-4d0d-ad94-295df9102c17","kind":"fork","sandbox":"sb_62hja7ddqg","parent":"ck_s64r3sc51p","layers":["s-a84b8218-7869-4d0d-ad94-295df9102c17","base"],"image":"a84b8218-7869-4d0d-ad94-295df9102c17","fingerprint":"fake/1","agent":"d08e4c760a57751d","engine":"fake","size_bytes":37474,"memory_bytes":610,"created_at":1796043959.7477734,"paused_ms":2.8,"dirty_mb":0.0,"inherits":{"template":"base","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256,"user":"user","workdir":"/home/user","env":{},"tainted":true}}' AS BLOB));
INSERT INTO "snapshots" VALUES('ck_s64r3sc51p','checkpoint','c','sb_62hja7ddqg',NULL,'["s-ck_s64r3sc51p","base"]','ck_s64r3sc51p','fake',0,1.79604395972605490683e+09,1.79604395973138332366e+09,CAST('{"id":"ck_s64r3sc51p","kind":"checkpoint","sandbox":"sb_62hja7ddqg","name":"c","layers":["s-ck_s64r3sc51p","base"],"image":"ck_s64r3sc51p","fingerprint":"fake/1","agent":"d08e4c760a57751d","engine":"fake","size_bytes":37474,"memory_bytes":610,"created_at":1796043959.726055,"paused_ms":23.02,"dirty_mb":0.0,"inherits":{"template":"base","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256,"user":"user","workdir":"/home/user","env":{},"tainted":true}}' AS BLOB));
INSERT INTO "snapshots" VALUES('d9dcc253-bee0-476d-b17e-552bfd52a67c','stop',NULL,'sb_te53w0grt1',NULL,'["s-d9dcc253-bee0-476d-b17e-552bfd52a67c","s-6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","base"]','d9dcc253-bee0-476d-b17e-552bfd52a67c','fake',0,1.79604395981878900531e+09,1.79604395981938481331e+09,CAST('{"id":"d9dcc253-bee0-476d-b17e-552bfd52a67c","kind":"stop","sandbox":"sb_te53w0grt1","layers":["s-d9dcc253-bee0-476d-b17e-552bfd52a67c","s-6d1f43e4-8d4c-48b2-8ecc-1b41c16a5d5f","base"],"image":"d9dcc253-bee0-476d-b17e-552bfd52a67c","fingerprint":"fake/1","agent":"d08e4c760a57751d","engine":"fake","size_bytes":37542,"memory_bytes":678,"created_at":1796043959.818789,"paused_ms":2.48,"dirty_mb":0.0,"inherits":{"template":"base","type":"small","cpus":1,"mem_mb":1024,"disk_mb":10240,"shape_mem_mb":1024,"shape_disk_mb":10240,"processes":256,"user":"user","workdir":"/home/user","env":{},"tainted":true}}' AS BLOB));
CREATE UNIQUE INDEX live_names ON sandboxes (name) WHERE state <> 'deleted';
CREATE INDEX sandboxes_by_snapshot ON sandboxes (snapshot) WHERE state <> 'deleted';
CREATE UNIQUE INDEX snapshot_names ON snapshots (name) WHERE kind = 'snapshot' AND name IS NOT NULL;
CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox);
CREATE INDEX replies_by_age ON replies (at);
COMMIT;
PRAGMA user_version = 2;

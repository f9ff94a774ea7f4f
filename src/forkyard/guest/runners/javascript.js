// The program that runs a session's JavaScript, inside the sandbox. Frames are as in python.py.
'use strict';
const fs = require('fs');
const path = require('path');
const repl = require('repl');
const util = require('util');
const {PassThrough} = require('stream');

const STEP = 4000;
const MAX_TEXT = 256 << 10;
const MAX_DATA = 16 << 20;
let id = '0'.repeat(32);

function writeAll(fd, data) {
  for (let at = 0; at < data.length;) {
    try {
      at += fs.writeSync(fd, data, at);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 2);
    }
  }
}

function send(fd, kind, payload = Buffer.alloc(0)) {
  for (let at = 0; ; at += STEP) {
    const piece = payload.subarray(at, at + STEP);
    const more = at + STEP < payload.length;
    const size = piece.length.toString(16).padStart(4, '0');
    const head = Buffer.from('\0' + id + (more ? kind.toUpperCase() : kind) + size, 'latin1');
    writeAll(fd, Buffer.concat([head, piece]));
    if (!more) return;
  }
}

let shortened = false;

function cut(said, limit = MAX_TEXT) {
  const text = Buffer.from(said).toString(); // without half surrogates
  if (text.length <= limit) return text;
  shortened = true;
  const half = limit >> 1;
  return `${text.slice(0, half)}\n... ${text.length - 2 * half} characters left out ...\n${text.slice(-half)}`;
}

function show(mime, data, name = null) {
  if (data.length > MAX_DATA) throw new RangeError(`${mime} of ${data.length} bytes is too large to show`);
  send(1, 'd', Buffer.concat([Buffer.from(JSON.stringify({mime, name}) + '\n'), data]));
}

// Hands a file (by its path), or a buffer, to whoever ran the code. A file is read when the code has ended.
globalThis.artifact = function artifact(what, name = null, mime = null) {
  if (typeof what !== 'string') return show(mime || 'application/octet-stream', Buffer.from(what), name);
  const whole = path.resolve(what);
  if (!fs.statSync(whole).isFile()) throw new Error(`no such file: ${whole}`);
  const head = {path: whole, name: name || path.basename(whole), mime};
  return send(1, 'p', Buffer.from(JSON.stringify(head)));
};

// Shows a value: a MIME bundle ({'text/html': ...}), or anything else as JSON.
globalThis.display = function display(value) {
  const types = value && typeof value === 'object' ? Object.keys(value).filter((key) => /^[a-z]+\/\S+$/.test(key)) : [];
  if (!types.length) return show('application/json', Buffer.from(JSON.stringify(value) ?? 'null'));
  for (const mime of types) {
    const data = value[mime];
    show(mime, typeof data === 'string' ? Buffer.from(data) : Buffer.isBuffer(data) ? data : Buffer.from(JSON.stringify(data)));
  }
};

function describe(error) {
  const known = error instanceof Error || (error && typeof error === 'object' && 'stack' in error);
  return {
    name: String(known ? error.name : typeof error).slice(0, 200),
    value: cut(String(known ? error.message : util.inspect(error)), 16384),
    traceback: cut(String(known ? error.stack : util.inspect(error))),
  };
}

const server = repl.start({
  input: new PassThrough(), output: new PassThrough(), prompt: '', terminal: false, useGlobal: true,
  breakEvalOnSigint: true,
});
const requests = process.stdin;
Object.defineProperty(process, 'stdin', {value: new PassThrough().end(), configurable: true});
process.on('uncaughtException', (error) => console.error(error));
process.on('unhandledRejection', (error) => console.error(error));
let refuse = null;
function interrupted() {
  if (refuse) refuse(Object.assign(new Error('interrupted'), {name: 'Interrupted'}));
}
// While a script runs the REPL has a watchdog for SIGINT, which does not get on with a listener, and which
// leaves the signal deadly when it goes.
function arm() {
  process.removeAllListeners('SIGINT');
  process.on('SIGINT', interrupted);
}
arm();
// Where a REPL has a domain, what the code throws ends up there and not with who asked for the evaluation.
if (server._domain) {
  server._domain.removeAllListeners('error');
  server._domain.on('error', (error) => (refuse ? refuse(error) : console.error(error)));
}

function evaluate(code) {
  return new Promise((resolve, reject) => {
    refuse = reject;
    process.removeAllListeners('SIGINT');
    server.eval(code, server.context, 'session', (error, value) => (error ? reject(error) : resolve(value)));
    arm();
  });
}

// How the latest runs ended: a run that is asked for again is told, not repeated.
const ended = new Map();

function finish(cut) {
  send(2, 'f');
  send(1, 'f', Buffer.from(JSON.stringify({code: ended.get(id), cut})));
}

async function run(code) {
  send(1, 'b');
  send(2, 'b');
  if (ended.has(id)) return finish(true);
  let failed = null;
  let result;
  shortened = false;
  try {
    result = await evaluate(code);
  } catch (error) {
    failed = describe(error);
    if (failed.name === 'SyntaxError' && error.err) failed = describe(error.err);
  }
  refuse = null;
  arm();
  if (!failed && result !== undefined) send(1, 'r', Buffer.from(cut(util.inspect(result))));
  if (failed) send(1, 'x', Buffer.from(JSON.stringify(failed)));
  ended.set(id, failed ? 1 : 0);
  if (ended.size > 32) ended.delete(ended.keys().next().value);
  finish(shortened);
}

let chain = Promise.resolve();
let rest = Buffer.alloc(0);
requests.on('data', (data) => {
  rest = Buffer.concat([rest, data]);
  for (let end; (end = rest.indexOf(10)) >= 0;) {
    const line = rest.subarray(0, end).toString();
    rest = rest.subarray(end + 1);
    let request;
    try {
      request = JSON.parse(line);
      if (typeof request.id !== 'string') continue;
    } catch {
      continue; // the rest of a line whose writer went away in the middle of it
    }
    chain = chain.then(async () => {
      id = request.id;
      if (typeof request.code === 'string') return run(request.code);
      send(2, 's');
      return send(1, 's');
    });
  }
});
requests.on('end', () => process.exit(0));

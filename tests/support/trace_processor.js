// Perfetto's trace processor under Node: reads a trace, and answers queries in SQL.
//
//     node trace_processor.js FOLDER TRACE QUERY...
//
// FOLDER has the files of Perfetto's interface: engine_bundle.js, a web worker, and its trace_processor*.wasm. The
// worker takes and gives messages of the protocol TraceProcessorRpcStream (protos/perfetto/trace_processor). This
// prints one JSON line for each query: a list of rows.

"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [folder, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3; // TraceProcessorRpc.TraceProcessorMethod

// Protocol buffers ---------------------------------------------------------------------------------------

function varint(number) {
  const bytes = [];
  for (; number > 127; number = Math.floor(number / 128)) bytes.push((number % 128) | 128);
  return Buffer.from([...bytes, number]);
}

const asNumber = (field, number) => Buffer.concat([varint(field * 8), varint(number)]);
const asBytes = (field, bytes) => Buffer.concat([varint(field * 8 + 2), varint(bytes.length), Buffer.from(bytes)]);

function readVarint(bytes, at) {
  let value = 0n, shift = 0n, byte;
  do {
    byte = bytes[at++];
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
  } while (byte & 128);
  return [Number(BigInt.asIntN(64, value)), at];
}

function* fields(bytes) {
  for (let at = 0, key, value; at < bytes.length; ) {
    [key, at] = readVarint(bytes, at);
    if (key % 8 === 0) [value, at] = readVarint(bytes, at);
    else {
      let length = key % 8 === 1 ? 8 : 4;
      if (key % 8 === 2) [length, at] = readVarint(bytes, at);
      value = bytes.subarray(at, at + length);
      at += length;
    }
    yield [Math.floor(key / 8), value];
  }
}

const all = (bytes, field) => [...fields(bytes)].filter(([n]) => n === field).map(([, value]) => value);
const one = (bytes, field) => all(bytes, field)[0];

function packedVarints(bytes = []) {
  const values = [];
  for (let at = 0, value; at < bytes.length; values.push(value)) [value, at] = readVarint(bytes, at);
  return values;
}

// The worker ---------------------------------------------------------------------------------------------

class Reader {
  // What the worker uses of an XMLHttpRequest: it reads the .wasm beside it.
  open(_method, name) {
    this.name = name;
  }
  send() {
    this.response = fs.readFileSync(path.join(folder, path.basename(this.name)));
  }
}

const answers = [];
const port = { postMessage: (bytes) => answers.push(Buffer.from(bytes)) };
const worker = { location: { href: "engine_bundle.js" } };
Object.assign(globalThis, {
  self: worker,
  WorkerGlobalScope: Object,
  XMLHttpRequest: Reader,
  console: { log() {}, warn() {}, error() {} },
  process: undefined, // by which it would know Node, and refuse it
});
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

function call(...request) {
  answers.length = 0;
  port.onmessage({ data: new Uint8Array(asBytes(1, Buffer.concat(request))) });
  const messages = answers.flatMap((bytes) => all(bytes, 1));
  for (const message of messages) {
    const fatal = one(message, 5);
    if (fatal) throw new Error(`trace processor: ${fatal}`);
  }
  return messages;
}

function rowsOf(messages) {
  let width = 0;
  const cells = [];
  for (const message of messages) {
    const result = one(message, 203);
    const error = one(result, 2);
    if (error && error.length) throw new Error(`query: ${error}`);
    width = all(result, 1).length || width;
    for (const batch of all(result, 3)) {
      const varints = all(batch, 2).flatMap(packedVarints);
      const strings = String(one(batch, 5) ?? "").split("\0");
      const doubles = Buffer.concat(all(batch, 3).map((bytes) => Buffer.from(bytes)));
      let d = 0;
      for (const kind of all(batch, 1).flatMap(packedVarints)) {
        if (kind === 1) cells.push(null);
        else if (kind === 2) cells.push(varints.shift());
        else if (kind === 3) cells.push(doubles.readDoubleLE(8 * d++));
        else if (kind === 4) cells.push(strings.shift());
        else throw new Error(`query: cells of type ${kind} are not read here`);
      }
    }
  }
  const rows = [];
  for (let at = 0; at < cells.length; at += width) rows.push(cells.slice(at, at + width));
  return rows;
}

worker.onmessage({ data: port });
setTimeout(() => {
  // The module is compiled by now, without waiting.
  call(asNumber(2, APPEND), asBytes(101, fs.readFileSync(trace)));
  call(asNumber(2, FINALIZE));
  for (const query of queries) {
    const rows = rowsOf(call(asNumber(2, QUERY), asBytes(103, asBytes(1, Buffer.from(query)))));
    fs.writeSync(1, JSON.stringify(rows) + "\n");
  }
}, 0);

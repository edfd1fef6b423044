// Runs the script of a page of `bagua trace` under Node, with a model of the little of a browser that it uses.
//
//     node page_under_node.js PAGE KEY...
//
// Prints one JSON line: the texts drawn on canvases, at first and after each of the keys.

"use strict";
const fs = require("fs");
const vm = require("vm");

const [page, ...keys] = process.argv.slice(2);
const text = fs.readFileSync(page, "utf8");
const [, data] = text.match(/<script id=data type="application\/json">([\s\S]*?)<\/script>/);
const [, script] = text.match(/<script>([\s\S]*?)<\/script>/);

let drawn = [];
const pen = new Proxy({}, {
  get: (_, name) => (name === "fillText" ? (what) => drawn.push(what) : () => undefined),
  set: () => true,
});

function element(id) {
  const listeners = {};
  return {
    style: {}, dataset: {}, children: [], listeners, clientWidth: 1200, textContent: id === "data" ? data : "",
    getBoundingClientRect: () => ({ width: 1200, height: 400 }),
    getContext: () => pen,
    addEventListener: (name, listener) => (listeners[name] = listener),
    append(...each) { this.children.push(...each); },
  };
}

const byId = {};
const ids = new Set([...text.matchAll(/\sid=["]?(\w+)/g)].map((found) => found[1]));
const document = {
  documentElement: element(),
  createElement: () => element(),
  getElementById: (id) => (ids.has(id) ? (byId[id] ??= element(id)) : null),
};
const window = { addEventListener() {}, innerWidth: 1200, matchMedia: () => ({ addEventListener() {} }) };
vm.runInNewContext(script, { document, window, getComputedStyle: () => ({ getPropertyValue: () => "#000" }) });

const shots = [drawn];
for (const key of keys) {
  drawn = [];
  byId.timeline.listeners.keydown({ key, preventDefault() {} });
  shots.push(drawn);
}
for (let x = 150; x < 1200; x += 25) {
  for (let y = 0; y < 400; y += 7) {
    byId.timeline.listeners.pointermove({ offsetX: x, offsetY: y, clientX: x, clientY: y });
    if (byId.hint.style.display === "block") byId.hint.seen = byId.hint.textContent;
  }
}
const { drawn: rows } = document.documentElement.dataset;
console.log(JSON.stringify({ rows, shots, hint: byId.hint.seen ?? "" }));

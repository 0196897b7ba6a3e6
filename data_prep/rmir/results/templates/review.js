
"use strict";
// Texts of the run and of imported files are only ever set as textContent or as field values.
const data = JSON.parse(document.getElementById("data").textContent);
const place = "review-" + data.sample;
const WORDS = { accept: "yes", reject: "no", unsure: "unsure" };
const KEYS = { j: "accept", f: "reject", h: "unsure" };
const show = (id) => document.getElementById(id);
const known = new Map(data.items.map((item) => [item.key, item.shown]));
// A Map, not a plain object: a key may equal a property name of Object.prototype.
let said = new Map();
let undone = [];
let at = 0;
let store = null;   // IndexedDB, if available
let writing = 0;    // unconfirmed writes
let warning = "";

function read(found) {
  // Verdicts on pairs of this page, from a saved file or the browser's store.
  const rows = new Map();
  for (const [key, value] of Object.entries(found || {})) {
    // Files of earlier versions hold true and false.
    const row = typeof value === "boolean" ? { verdict: value ? "accept" : "reject" } : value || {};
    const verdict = Object.hasOwn(WORDS, row.verdict) ? row.verdict : null;
    const comment = typeof row.comment === "string" ? row.comment.slice(0, 2000) : "";
    const same = known.has(key) && [undefined, known.get(key)].includes(row.shown);
    if (same && (verdict || comment)) rows.set(key, { verdict, comment });
  }
  return rows;
}

function keep() {
  // IndexedDB, because Chromium loses localStorage of pages opened as files.
  if (!store) return;
  let write;
  try { write = store.transaction("reviews", "readwrite", { durability: "strict" }); } catch (error) { return forget(); }
  writing += 1;
  write.objectStore("reviews").put({ verdicts: Object.fromEntries(said), by: show("name").value }, place);
  write.oncomplete = () => { writing -= 1; };
  write.onabort = () => { writing -= 1; forget(); };
}

function forget() {
  store = null;
  warning = "This browser cannot store verdicts: save before you close the page.";
  note("");
}

function note(text) { show("note").textContent = [text, warning].filter(Boolean).join(" "); }

function judged() { return data.items.filter((item) => said.get(item.key)?.verdict).length; }

function open(from) {
  for (let step = 0; step < data.items.length; step += 1) {
    const index = (from + step) % data.items.length;
    if (!said.get(data.items[index].key)?.verdict) return index;
  }
  return -1;
}

function draw() {
  const item = data.items[at], row = said.get(item.key), done = judged();
  show("query").textContent = item.query;
  show("given").src = data.pictures[item.given];
  show("answer").src = data.pictures[item.answer];
  show("bar").max = data.items.length;
  show("bar").value = done;
  show("count").textContent = `${at + 1} of ${data.items.length}, ${done} judged`;
  show("said").textContent = row?.verdict ? `you said: ${WORDS[row.verdict]}` : "";
  show("comment").value = row?.comment || "";
  show("done").hidden = done < data.items.length;
}

function remember() {
  undone.push({ said: new Map(said), at });
  if (undone.length > 500) undone.shift();
}

function put(key, change) {
  const row = { verdict: null, comment: "", ...said.get(key), ...change };
  if (row.verdict || row.comment) said.set(key, row); else said.delete(key);
  keep();
}

function zoom(id) {
  show("zoom").classList.remove("close-up");
  show("large").src = show(id).src;
  show("large").alt = show(id).alt;
  show("zoom").dataset.of = id;
  if (!show("zoom").open) show("zoom").showModal();
}

function save() {
  const by = show("name").value.trim();
  const rows = [...said].map(([key, row]) => [key, { ...row, shown: known.get(key) }]);
  const text = JSON.stringify({ sample: data.sample, by, verdicts: Object.fromEntries(rows) }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = by ? `verdicts-${by.replace(/[^\p{L}\p{N}]+/gu, "-")}.json` : "verdicts.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  note(`Saved as ${link.download}: ${judged()} of ${data.items.length} judged.`);
}

async function load(file) {
  let rows;
  try { rows = read(JSON.parse(await file.text()).verdicts); } catch (error) { rows = new Map(); }
  if (!rows.size) return note(`${file.name} holds no verdict on any pair of this page.`);
  remember();
  let changed = 0;
  for (const [key, row] of rows) {
    const old = said.get(key);
    if (old?.verdict && row.verdict && old.verdict !== row.verdict) changed += 1;
    said.set(key, { verdict: row.verdict || old?.verdict || null, comment: row.comment || old?.comment || "" });
  }
  keep();
  draw();
  note(`Imported ${rows.size} from ${file.name}; ${changed} of your verdicts changed (U undoes it).`);
}

function press(key) {
  key = key.length === 1 ? key.toLowerCase() : key;
  if (key in KEYS) {
    remember();
    put(data.items[at].key, { verdict: KEYS[key] });
    if (at < data.items.length - 1) at += 1;
    note("");
  } else if (key === "ArrowLeft") at = Math.max(0, at - 1);
  else if (key === "ArrowRight") at = Math.min(data.items.length - 1, at + 1);
  else if (key === "n") { const next = open(at + 1); if (next < 0) note("Every pair has a verdict."); else at = next; }
  else if (key === "u") {
    const before = undone.pop();
    if (!before) return note("Nothing to undo.");
    ({ said, at } = before);
    keep();
    note("Undone.");
  } else if (key === "z") return zoom(show("zoom").open && show("zoom").dataset.of === "answer" ? "given" : "answer");
  else if (key === "c") return show("comment").focus();
  else if (key === "s") return save();
  else if (key === "i") return show("file").click();
  else if (key === "?") return show("keys").showModal();
  else return;
  draw();
}

function begin(stored) {
  said = read(stored.verdicts);
  if (typeof stored.by === "string") show("name").value = stored.by;
  at = Math.max(0, open(0));
  draw();
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("textarea, input");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if ((event.ctrlKey || event.metaKey) && event.key === "z") { event.preventDefault(); return press("u"); }
    if (event.ctrlKey || event.metaKey || event.altKey || show("keys").open) return;
    if (show("zoom").open && event.key.toLowerCase() !== "z") return;
    if (event.key === "c") event.preventDefault();  // else the letter is typed into the field
    press(event.key);
  });
  for (const button of document.querySelectorAll("button[data-key]")) {
    button.addEventListener("click", () => { press(button.dataset.key); button.blur(); });
  }
  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => { zoom(button.dataset.zoom); button.blur(); });
  }
  for (const button of document.querySelectorAll("button[data-close]")) {
    button.addEventListener("click", () => show(button.dataset.close).close());
  }
  show("large").addEventListener("click", () => show("zoom").classList.toggle("close-up"));
  show("comment").addEventListener("input", () => put(data.items[at].key, { comment: show("comment").value }));
  show("name").addEventListener("input", keep);
  show("file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) load(file);
  });
  addEventListener("beforeunload", (event) => { if (writing || (warning && said.size)) event.preventDefault(); });
  document.body.dataset.ready = "";
}

function fresh() { forget(); begin({}); }

try {
  const asked = indexedDB.open("rge-review", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("reviews");
  asked.onerror = fresh;
  asked.onsuccess = () => {
    store = asked.result;
    store.onclose = forget;
    const found = store.transaction("reviews").objectStore("reviews").get(place);
    found.onsuccess = () => begin(found.result || {});
    found.onerror = fresh;
  };
} catch (error) { fresh(); }

// What is shown comes from models and users: it is put in as text, never as markup.
"use strict";

const by = (id) => document.getElementById(id);
let picture = null;      // how the server finds the query's picture: {example}, {source, id} or {data}
let asking = null;       // aborts the question under way; the model then stops writing

function element(kind, text, name) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function address(place) {
  return place.data || "api/picture?" + new URLSearchParams(place);
}

function choose(place, preview) {
  picture = place;
  by("picture").hidden = by("clear").hidden = place === null;
  by("hint").firstChild.textContent = place ? "Drop another here, or " : "Drop a picture, a PDF or a clip here, or ";
  if (place) by("picture").src = preview || address(place); else by("picture").removeAttribute("src");
}

function fail(message) {
  by("error").textContent = message;
  by("error").hidden = !message;
}

function read(file) {
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => upload(reader.result, file.name);
  reader.onerror = () => fail("The file cannot be read.");
  reader.readAsDataURL(file);
}

// Pages and frames are made by the server, before the question, so that a file that cannot be read is not asked about.
async function upload(data, name) {
  if (/\.(mkv|avi|mpe?g|mts|m2ts|ts|m4v)$/i.test(name)) data = data.replace(/^data:[^;]*/, "data:video/x-any");
  if (!/^data:(video\/|application\/pdf)/.test(data)) {
    choose({data});
  } else {
    fail("");
    try {
      const response = await fetch("api/preview", {method: "POST", body: JSON.stringify({data})});
      if (!response.ok) return fail((await response.json()).error);
      choose({data}, URL.createObjectURL(await response.blob()));
    } catch (error) {
      return fail(error.message);
    }
  }
  ask(null);
}

function busy(is) {
  by("rationale").classList.toggle("writing", is);
  by("again").disabled = by("swap").disabled = is;
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += value;
    const whole = rest.split("\n");
    rest = whole.pop();
    for (const line of whole) yield JSON.parse(line);
  }
}

async function post(path, body, signal) {
  const response = await fetch(path, {method: "POST", body: JSON.stringify(body), signal});
  if (!response.ok) {
    const text = await response.text();
    let words = text;
    try { words = JSON.parse(text).error || text; } catch { /* not ours */ }
    throw new Error(words);
  }
  return response;
}

// rationale: null lets the model write; a text is embedded as it stands.
async function ask(rationale) {
  if (asking) asking.abort();
  const mine = asking = new AbortController();
  fail("");
  busy(true);
  by("state").textContent = rationale === null ? "is being written" : "as you gave it";
  if (rationale === null) { by("rationale").value = ""; by("whose").hidden = true; }
  by("changed").hidden = true;
  for (const id of ["hits", "direct"]) by(id).replaceChildren();
  try {
    const body = {
      question: by("question").value, picture, rationale, instruction: by("instruction").value,
      where: by("where").value || null, hybrid: by("hybrid").checked,
    };
    let direct = [];
    for await (const news of lines(await post("api/ask", body, mine.signal))) {
      if (news.error) throw new Error(news.error);
      if (news.waiting) by("state").textContent = `waiting: ${news.waiting} ${news.waiting === 1 ? "question" : "questions"} first`;
      if (news.rationale !== undefined) { by("rationale").value = news.rationale; by("state").textContent = "is being written"; }
      if (news.direct) show("direct", direct = news.direct, () => null);
      if (news.hits) {
        if (rationale === null) by("state").textContent = news.forced ? "by the model, cut off at its limit" : "by the model";
        else by("state").textContent = "as you gave it";
        show("hits", news.hits, (hit, place) => moved(hit, place, news.compared));
        compare(direct, news.hits);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    by("state").textContent = "";
    fail(error.message);
  } finally {
    if (asking === mine) { asking = null; busy(false); }
  }
}

// Where a hit was without the rationale.
function moved(hit, place, compared) {
  if (by("direct").parentElement.hidden) return null;
  if (hit.was === place + 1) return element("span", "same place", "was");
  if (hit.was && hit.was <= place) return element("span", `\u25bc was #${hit.was}`, "was");
  return element("span", hit.was ? `\u25b2 was #${hit.was}` : `\u25b2 not in the top ${compared}`, "was up");
}

// What the rationale changed, in words and on the hits that it lost.
function compare(direct, hits) {
  const name = (hit) => hit.source + "\n" + hit.id;
  const kept = new Set(hits.map(name));
  [...by("direct").children].forEach((item) => item.classList.toggle("left", !kept.has(item.dataset.name)));
  if (!hits.length || !direct.length || by("words").hidden) return;
  const fresh = hits.filter((hit) => !hit.was || hit.was > direct.length).length;
  const top = name(hits[0]) === name(direct[0]) ? "The top hit is the same" : `The top hit changed from ${title(direct[0])} to ${title(hits[0])}`;
  by("changed").textContent = `What the rationale changed: ${fresh} of ${hits.length} hits are new. ${top}.`;
  by("changed").hidden = false;
}

// A page is named by its file and number: what is written on it is long.
function label(hit) {
  return hit.metadata?.document && hit.metadata.page ? hit.id : hit.text || hit.id;
}

function title(hit) {
  return label(hit).slice(0, 60);
}

function show(id, hits, note) {
  by(id).replaceChildren(...hits.map((hit, place) => {
    const item = element("li");
    const button = element("button");
    button.type = "button";
    button.title = "Enlarge";
    button.onclick = () => enlarge(hit);
    item.dataset.name = hit.source + "\n" + hit.id;
    if (hit.has_picture) {
      const image = element("img");
      image.src = address({source: hit.source, id: hit.id});
      image.alt = "";
      image.loading = "lazy";
      button.append(image);
    }
    const words = element("span", `${place + 1}. ${label(hit).slice(0, 200)} `);
    words.append(element("span", hit.score.toFixed(4), "score"));
    if (hit.gone) words.append(element("span", " no longer where it was indexed", "gone"));
    button.append(words);
    const where = note(hit, place);
    if (where) {
      button.append(where);
      if (where.classList.contains("up")) button.classList.add("moved");
    }
    item.append(button);
    return item;
  }));
  if (!hits.length) by(id).replaceChildren(element("li", "Nothing found."));
}

function enlarge(hit) {
  by("large-picture").hidden = !hit.has_picture;
  if (hit.has_picture) by("large-picture").src = address({source: hit.source, id: hit.id, large: true});
  by("large-name").textContent = hit.id;
  by("large-text").textContent = hit.text || "";
  const facts = {score: hit.score.toFixed(4), from: hit.folder, ...hit.metadata};
  by("large-facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value !== null && value !== "")
    .flatMap(([name, value]) => [element("dt", name), element("dd", typeof value === "object" ? JSON.stringify(value) : String(value))]));
  by("large-ask").onclick = () => {
    by("large").close();
    if (hit.has_picture) choose({source: hit.source, id: hit.id});
    else { by("question").value = hit.text || ""; choose(null); }
    scrollTo({top: 0});
    ask(null);
  };
  by("large").showModal();
}

async function swap() {
  fail("");
  busy(true);
  try {
    const other = await (await post("api/other", {question: by("question").value})).json();
    by("rationale").value = other.rationale;
    by("whose").textContent = `Written for another query: ${other.question}`;
    by("whose").hidden = false;
    await ask(other.rationale);
  } catch (error) {
    fail(error.message);
    busy(false);
  }
}

async function begin() {
  const about = await (await fetch("api/about")).json();
  by("about").textContent = `${about.checkpoint}, ${about.items} items`;
  by("instruction").value = about.instruction || "";
  by("icons").hidden = !about.knows_icons_only;
  if (about.query_mode !== "reasoning") {  // it was trained to write nothing
    by("words").hidden = true;
    by("purpose").textContent = "Ask about a picture: the model searches the index, without writing a rationale first.";
    const [found, without] = document.querySelectorAll(".found h2");
    found.textContent = "Found";
    without.textContent = "Without them";
    without.parentElement.hidden = about.query_mode === "direct";
  }
  by("columns").textContent = `a condition on ${about.columns.join(", ")}`;
  const starts = about.examples.length ? about.examples : about.pictures.map((place) => ({picture: place}));
  by("questions").replaceChildren(...[...new Set(about.examples.map((one) => one.question))].map((text) => {
    const option = element("option");
    option.value = text;
    return option;
  }));
  by("strip").replaceChildren(...starts.map((one) => {
    const button = element("button");
    const image = element("img");
    button.type = "button";
    button.title = one.question || one.picture.id;
    image.src = address(one.picture);
    image.alt = button.title;
    image.loading = "lazy";
    button.append(image);
    button.onclick = () => { choose(one.picture); if (one.question) by("question").value = one.question; ask(null); };
    return button;
  }));
  if (about.examples.length) by("strip").firstChild.click();  // one whose first hit is right
}

by("query").onsubmit = (event) => { event.preventDefault(); ask(null); };
by("again").onclick = () => ask(by("rationale").value);
by("swap").onclick = swap;
by("large-close").onclick = () => by("large").close();
by("large").onclick = (event) => { if (event.target === by("large")) by("large").close(); };
by("clear").onclick = () => choose(null);
by("file").onchange = () => { read(by("file").files[0]); by("file").value = ""; };
by("drop").ondragover = (event) => { event.preventDefault(); by("drop").classList.add("over"); };
by("drop").ondragleave = () => by("drop").classList.remove("over");
by("drop").ondrop = (event) => {
  event.preventDefault();
  by("drop").classList.remove("over");
  read(event.dataTransfer.files[0]);
};
begin().catch((error) => fail(`The server does not answer: ${error.message}`));

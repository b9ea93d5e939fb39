// The review page: the server holds everything, this shows sixty examples of it and sends decisions.
// Text from the data only ever goes through textContent, so that no name can become markup.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { run: null, cards: [], current: 0, total: 0, start: 0, asked: 0, open: null, queue: "all" };
const form = $("filters");

// --- talking to the server ---------------------------------------------------------------------------------------

async function ask(path, body) {
  const options = { credentials: "same-origin", cache: "no-store" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } });
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; start crosel review again and open its new address");
  }
  if (answer.ok) return answer.json();
  if (answer.status === 403) throw new Error("this page's token is no longer valid; open the address that crosel review printed last");
  let detail = answer.statusText;
  try { detail = (await answer.json()).detail; } catch { /* plain text */ }
  throw new Error(typeof detail === "string" ? detail : `refused (${answer.status})`);
}

let queue = Promise.resolve(); // decisions reach the log in the order of the keys
function inTurn(work) {
  const done = queue.then(work);
  queue = done.catch(() => {});
  return done;
}

// --- building blocks ---------------------------------------------------------------------------------------------

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}
const percent = (p) => (p === null || p === undefined ? "" : `${(100 * p).toFixed(p >= 0.9995 || p < 0.0005 ? 0 : 1)} %`);
const word = (label) => state.run.classes[label] ?? "?";
const number = (n) => n.toLocaleString("en-GB");

let hide;
function say(text, bad = false) {
  const box = $("status");
  box.textContent = text;
  box.classList.toggle("bad", bad);
  clearTimeout(hide);
  if (!bad) hide = setTimeout(() => { box.textContent = ""; }, 4000);
}

function showProgress(p) {
  $("bar").max = p.n;
  $("bar").value = p.done;
  $("done").textContent = `${number(p.done)} of ${number(p.n)} decided`;
  $("counts").textContent =
    `${number(p.accept)} accepted · ${number(p.choose)} changed · ${number(p.outside)} outside the set · ${number(p.skip)} skipped`;
}

// --- cards -------------------------------------------------------------------------------------------------------

const VERDICTS = { accept: "accepted", choose: "changed to", outside: "outside the set:", skip: "skipped" };

function choice(card, label, p, key, extra) {
  const button = make("button", "choice");
  button.type = "button";
  button.tabIndex = -1;
  button.dataset.label = label;
  if (label === card.label) button.classList.add("run");
  if (extra) button.classList.add("beyond");
  if (key && key !== word(label)) button.append(make("kbd", "", key));
  button.append(make("span", "word", extra ? `${word(label)} (outside)` : word(label)));
  if (p !== null && p !== undefined) button.append(make("span", "p", percent(p)));
  const taken = card.decided && card.decided.label === label;
  button.classList.toggle("taken", Boolean(taken));
  button.setAttribute("aria-pressed", String(Boolean(taken)));
  return button;
}

function picture(card, large = "") {
  const image = make("img", "picture");
  image.src = `/image/${card.row}.png?v=${encodeURIComponent(state.run.version)}${large}`;
  image.alt = `example ${card.id}`;
  image.decoding = "async";
  image.onload = () => image.classList.toggle("photo", Math.max(image.naturalWidth, image.naturalHeight) > 64);
  return image;
}

// "8 → 5 ×2": what a network predicted in the last epochs, the newest last.
function past(labels) {
  const runs = [];
  for (const label of labels) {
    if (runs.length && runs.at(-1).label === label) runs.at(-1).times += 1;
    else if (label >= 0) runs.push({ label, times: 1 });
  }
  return runs.map((run) => (run.times > 1 ? `${word(run.label)} ×${run.times}` : word(run.label))).join(" → ");
}

function networkLine(network, index) {
  const says = (network.past && past(network.past)) || (network.label < 0 ? "none" : word(network.label));
  const line = make("p", "soft", `network ${index + 1}: `);
  const history = make("span", "past", says);
  if (network.past) history.title = `predictions of the last ${network.past.length} epochs, the newest last`;
  line.append(history, ` ${percent(network.confidence)}`);
  if (network.selected || network.epochs) {
    const times = network.epochs ? ` (${network.epochs} epoch${network.epochs === 1 ? "" : "s"})` : "";
    line.append(`, ${network.selected ? "selected" : "was selected"}${times}`);
  }
  return line;
}

function fill(article, card, index) {
  article.replaceChildren();
  article.className = "card";
  article.classList.toggle("decided", Boolean(card.decided));
  article.dataset.index = index;
  const title = make("h2", "answer", word(card.label));
  const name = make("p", "id", card.id);
  title.id = `card-${index}`;
  name.id = `id-${index}`;
  article.setAttribute("aria-labelledby", `${title.id} ${name.id}`);
  const head = make("div", "head");
  if (state.run.images) {
    const image = picture(card);
    image.title = "larger: z";
    image.loading = "lazy";
    head.append(image);
  }
  const facts = make("div", "facts-list");
  const sure = make("p", "soft", `${percent(card.within)} sure within its set`);
  sure.title = `confidence ${percent(card.confidence)}`;
  facts.append(title, name, sure);
  if (card.flag) facts.append(make("span", "badge", card.flag), " ");
  if (card.decided) {
    const { decision, label } = card.decided;
    const name = decision === "choose" || decision === "outside" ? ` ${word(label)}` : "";
    facts.append(make("span", "verdict", VERDICTS[decision] + name));
  }
  if (card.networks) {
    const networks = make("details", "networks");
    networks.append(make("summary", "", "Networks"), ...card.networks.map(networkLine));
    networks.firstChild.tabIndex = -1;
    facts.append(networks);
  } else if (card.selected) facts.append(make("p", "soft", `selected by ${card.selected}`));
  head.append(facts);
  article.append(head);
  if (card.text !== undefined) {
    const text = make("p", "text", card.text);
    text.tabIndex = 0; // so that the keys can scroll it
    article.append(text);
  }
  if (card.features) {
    const list = make("dl", "values");
    card.features.forEach((value, i) => {
      const pair = make("div");
      pair.append(make("dt", "", state.run.columns[i] ?? `x${i}`), make("dd", "", value));
      list.append(pair);
    });
    article.append(list);
    if (card.features_more) article.append(make("p", "note", `and ${number(card.features_more)} more features`));
  }
  const list = make("ul", "choices");
  list.setAttribute("aria-label", "Candidates");
  const add = (...items) => { const li = make("li"); li.append(...items); list.append(li); };
  for (const c of card.candidates) add(choice(card, c.label, c.p, c.key));
  if (card.outside) add(choice(card, card.outside.label, card.outside.p, card.outside.key, true));
  if (card.more) add(make("span", "note", `and ${number(card.more)} more`));
  article.append(list);
  const actions = make("div", "do");
  for (const [name, label, key] of [["accept", "Accept", "a"], ["other", "Other", "o"], ["skip", "Skip", "s"]]) {
    const button = make("button", "", label);
    button.type = "button";
    button.tabIndex = -1;
    button.dataset.do = name;
    button.append(make("kbd", "", key));
    actions.append(button);
  }
  article.append(actions);
}

const articleAt = (index) => $("cards").children[index]?.firstElementChild;

function redraw(row) {
  const index = state.cards.findIndex((card) => card.row === row);
  if (index < 0) return;
  const hadFocus = articleAt(index).contains(document.activeElement);
  fill(articleAt(index), state.cards[index], index);
  mark(index === state.current ? index : state.current, false);
  if (hadFocus) articleAt(index).focus({ preventScroll: true });
}

// One card at a time can be reached by Tab, and within it its buttons; the arrows go from card to card.
function mark(index, focus = true) {
  const set = (i, on) => {
    const article = articleAt(i);
    if (!article) return;
    article.classList.toggle("current", on);
    article.tabIndex = on ? 0 : -1;
    if (on) article.setAttribute("aria-current", "true"); else article.removeAttribute("aria-current");
    for (const button of article.querySelectorAll("button, summary")) button.tabIndex = on ? 0 : -1;
  };
  if (index !== state.current) set(state.current, false);
  state.current = index;
  set(index, true);
  const article = articleAt(index);
  if (article && focus) {
    article.focus({ preventScroll: true });
    article.scrollIntoView({ block: "nearest" });
  }
}

// --- pages and filters -------------------------------------------------------------------------------------------

function filters() {
  const values = new URLSearchParams();
  const share = (name, otherwise) => {
    const value = form.elements[name].value.trim();
    const number = value === "" ? otherwise : Number(value);
    return Number.isFinite(number) ? Math.min(1, Math.max(0, number / 100)) : otherwise / 100;
  };
  if (form.elements.text.value === "") values.set("queue", state.queue); // who looks for an id looks everywhere
  for (const name of ["state", "label", "within", "flag", "text", "sort"]) {
    if (form.elements[name].value !== "") values.set(name, form.elements[name].value);
  }
  values.set("low", share("low", 0));
  values.set("high", share("high", 100));
  return values;
}

// place: {} for the first page, {after: row} or {before: row}; focus: "first" (that is still open), "last", or null for none.
async function load(place, focus) {
  const asked = ++state.asked;
  const query = filters();
  for (const [name, row] of Object.entries(place)) query.set(name, row);
  $("cards").classList.add("waiting");
  try {
    await queue; // what was just decided must count
    const answer = await ask(`/api/examples?${query}`);
    if (asked !== state.asked) return; // a newer question is under way
    if (!answer.examples.length && answer.total && !("before" in place)) {
      say("that was the last page");
      if (state.cards.length) return;
    }
    state.cards = answer.examples;
    state.total = answer.total;
    state.start = answer.start;
    const list = $("cards");
    list.replaceChildren();
    state.cards.forEach((card, index) => {
      const item = make("li");
      const article = make("article");
      fill(article, card, index);
      item.append(article);
      list.append(item);
    });
    showProgress(answer.progress);
    const end = state.start + state.cards.length;
    $("where").textContent = state.cards.length
      ? `${number(state.start + 1)} to ${number(end)} of ${number(state.total)}` : `none of ${number(state.total)}`;
    $("empty").hidden = state.cards.length > 0;
    for (const button of document.querySelectorAll("[data-page]")) {
      button.disabled = button.dataset.page === "next" ? end >= state.total : state.start === 0;
    }
    const open = state.cards.findIndex((card) => !card.decided);
    state.current = 0;
    if (focus === "first") window.scrollTo({ top: 0 });
    mark(focus === "last" ? state.cards.length - 1 : Math.max(0, open), focus !== null);
    remember(place);
  } catch (error) {
    if (asked === state.asked) say(error.message, true);
  } finally {
    if (asked === state.asked) $("cards").classList.remove("waiting");
  }
}

// Labels whose sets seem to miss the truth are a queue of their own: there the question is another.
function showQueue(name) {
  state.queue = name;
  for (const button of document.querySelectorAll("[data-queue]")) {
    button.setAttribute("aria-pressed", String(button.dataset.queue === name));
  }
}

function turn(way) {
  if (way === "first") return load({}, "first");
  if (way === "previous") return state.start > 0 ? load({ before: state.cards[0].row }, "first") : say("this is the first page");
  return state.start + state.cards.length < state.total ? load({ after: state.cards.at(-1).row }, "first") : say("this is the last page");
}

// The filter and the page are in the address after the #, so that a reload comes back to them.
function remember(place) {
  const all = filters();
  for (const [name, row] of Object.entries(place)) all.set(name, row);
  history.replaceState(null, "", `/#${all}`);
}

function recall() {
  const saved = new URLSearchParams(location.hash.slice(1));
  if (state.run.outside) showQueue(saved.get("queue") === "outside" ? "outside" : "labels");
  for (const name of ["state", "label", "within", "flag", "text", "sort"]) {
    if (!saved.has(name)) continue;
    form.elements[name].value = saved.get(name);
    if (form.elements[name].selectedIndex === -1) form.elements[name].selectedIndex = 0;
  }
  for (const name of ["low", "high"]) {
    const value = Number(saved.get(name));
    if (saved.has(name) && value >= 0 && value <= 1) form.elements[name].value = String(+(100 * value).toFixed(4));
  }
  const place = {};
  for (const name of ["after", "before"]) if (/^\d{1,9}$/.test(saved.get(name) ?? "")) place[name] = saved.get(name);
  return place;
}

// --- decisions ---------------------------------------------------------------------------------------------------

function decide(index, label) {
  const card = state.cards[index];
  if (!card) return;
  const saved = inTurn(() => ask("/api/decisions", { row: card.row, label }));
  step(index);
  saved.then((answer) => {
    card.decided = answer.decided;
    showProgress(answer.progress);
    redraw(card.row);
    const { decision } = answer.decided;
    say(`${card.id}: ${VERDICTS[decision]}${decision === "skip" ? "" : ` ${word(answer.decided.label)}`}`);
  }, (error) => {
    say(`${card.id} is not saved: ${error.message}`, true);
    const back = state.cards.findIndex((other) => other.row === card.row);
    if (back >= 0) mark(back);
  });
}

// On to the next card that is still open; when there is none left here, the next page.
function step(index) {
  let next = index + 1;
  while (next < state.cards.length && state.cards[next].decided) next += 1;
  if (next < state.cards.length) mark(next);
  else if (state.start + state.cards.length < state.total) load({ after: state.cards.at(-1).row }, "first");
  else { mark(Math.min(index + 1, state.cards.length - 1)); }
}

function undo() {
  inTurn(() => ask("/api/undo", {})).then((answer) => {
    showProgress(answer.progress);
    if (answer.row === null) { say("there is nothing to undo"); return; }
    say(`undone: ${answer.example.id}`);
    const index = state.cards.findIndex((card) => card.row === answer.row);
    if (index >= 0) {
      state.cards[index] = answer.example;
      redraw(answer.row);
      mark(index);
    }
  }, (error) => say(error.message, true));
}

function press(index, key) {
  const card = state.cards[index];
  const found = [...card.candidates, card.outside].find((c) => c?.key === key);
  if (found) decide(index, found.label);
  else say(`no candidate has the key ${key}; o finds any label`);
}

// --- any label ---------------------------------------------------------------------------------------------------

const SHOWN = 200;

async function openChooser(index) {
  const card = state.cards[index];
  if (!card) return;
  try {
    const classes = await ask(`/api/classes/${card.row}`);
    state.open = { index, classes, at: 0 };
    $("choose-title").textContent = `Another label for ${card.id}`;
    $("search").value = "";
    listOptions();
    $("choose").showModal();
    $("search").focus();
  } catch (error) {
    say(error.message, true);
  }
}

function listOptions() {
  const wanted = $("search").value.trim().toLocaleLowerCase();
  const fitting = state.open.classes.filter((c) => word(c.label).toLocaleLowerCase().includes(wanted));
  state.open.shown = fitting.slice(0, SHOWN);
  state.open.at = 0;
  const list = $("options");
  list.replaceChildren();
  state.open.shown.forEach((c, i) => {
    const option = make("li");
    option.id = `option-${i}`;
    option.setAttribute("role", "option");
    option.dataset.at = i;
    option.append(make("span", "word", word(c.label)), make("span", "soft", c.inside ? "in the set" : "outside"), make("span", "soft", percent(c.p)));
    list.append(option);
  });
  $("options-note").textContent = fitting.length > SHOWN ? `and ${number(fitting.length - SHOWN)} more: type a part of the name`
    : fitting.length ? "" : "no class has such a name";
  point(0);
}

function point(at) {
  const options = $("options").children;
  state.open.at = Math.max(0, Math.min(options.length - 1, at));
  [...options].forEach((option, i) => option.setAttribute("aria-selected", String(i === state.open.at)));
  const chosen = options[state.open.at];
  if (chosen) { $("search").setAttribute("aria-activedescendant", chosen.id); chosen.scrollIntoView({ block: "nearest" }); }
  else $("search").removeAttribute("aria-activedescendant");
}

function enlarge(index) {
  const card = state.cards[index];
  if (!card || !state.run.images) return;
  $("picture").replaceChildren(picture(card, "&large=true"));
  $("picture-title").textContent = `${word(card.label)}, ${card.id}`;
  $("large").showModal();
}

function take(at) {
  const { index, shown } = state.open;
  if (!shown[at]) return;
  $("choose").close();
  decide(index, shown[at].label);
}

// --- what people do ----------------------------------------------------------------------------------------------

function columns() {
  const items = [...$("cards").children];
  if (!items.length) return 1;
  const top = items[0].offsetTop;
  return Math.max(1, items.filter((item) => item.offsetTop === top).length);
}

function move(by) {
  const next = state.current + by;
  if (next >= 0 && next < state.cards.length) mark(next);
  else if (by > 0 && state.start + state.cards.length < state.total && state.current === state.cards.length - 1) turn("next");
  else if (by < 0 && state.start > 0 && state.current === 0) load({ before: state.cards[0].row }, "last");
  else mark(by > 0 ? state.cards.length - 1 : 0);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || !state.run) return;
  if (event.target.closest("dialog, input, select, textarea")) return;
  const key = event.key;
  const inside = event.target.closest("button, a, summary");
  if (inside && (key === "Enter" || key === " ")) return; // the button's own
  if (key === "?") { event.preventDefault(); $("help").showModal(); return; }
  if (key === "/") { event.preventDefault(); $("text").focus(); return; }
  if (key === "u") { event.preventDefault(); undo(); return; }
  if (key === "n" || key === "p") { event.preventDefault(); turn(key === "n" ? "next" : "previous"); return; }
  if (!state.cards.length || $("cards").classList.contains("waiting")) return;
  const actions = {
    Enter: () => decide(state.current, state.cards[state.current].label),
    a: () => decide(state.current, state.cards[state.current].label),
    s: () => decide(state.current, null),
    o: () => openChooser(state.current),
    z: () => enlarge(state.current),
    ArrowRight: () => move(1), ArrowLeft: () => move(-1),
    ArrowDown: () => move(columns()), ArrowUp: () => move(-columns()),
    Home: () => mark(0), End: () => mark(state.cards.length - 1),
  };
  if (Object.hasOwn(actions, key)) { event.preventDefault(); if (!event.repeat || key.startsWith("Arrow")) actions[key](); }
  else if (/^[0-9a-z]$/.test(key)) { event.preventDefault(); if (!event.repeat) press(state.current, key); }
});

$("cards").addEventListener("click", (event) => {
  const article = event.target.closest("article");
  if (!article) return;
  const index = Number(article.dataset.index);
  const button = event.target.closest("button");
  if (event.target.closest("summary")) { mark(index, false); return; }
  if (!button) {
    mark(index);
    if (event.target.closest(".picture")) enlarge(index);
    return;
  }
  if (button.dataset.label !== undefined) decide(index, Number(button.dataset.label));
  else if (button.dataset.do === "accept") decide(index, state.cards[index].label);
  else if (button.dataset.do === "skip") decide(index, null);
  else { mark(index, false); openChooser(index); }
});

$("search").addEventListener("input", listOptions);
$("search").addEventListener("keydown", (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) { event.preventDefault(); point(state.open.at + by); }
  else if (event.key === "Enter") { event.preventDefault(); take(state.open.at); }
});
$("options").addEventListener("click", (event) => {
  const option = event.target.closest("li");
  if (option) take(Number(option.dataset.at));
});
for (const id of ["choose", "help", "large"]) {
  $(id).addEventListener("close", () => articleAt(state.current)?.focus({ preventScroll: true }));
}
$("large").addEventListener("keydown", (event) => { if (event.key === "z") $("large").close(); });
$("large").addEventListener("click", () => $("large").close());
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => $(button.dataset.close).close());
}
for (const button of document.querySelectorAll("[data-page]")) {
  button.addEventListener("click", () => turn(button.dataset.page));
}
for (const button of document.querySelectorAll("[data-queue]")) {
  button.addEventListener("click", () => { showQueue(button.dataset.queue); load({}, "first"); });
}
$("undo").addEventListener("click", undo);
$("keys").addEventListener("click", () => $("help").showModal());

let typing;
form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => load({}, null), 150); });
form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typing); load({}, "first"); });
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.tagName === "INPUT") { event.preventDefault(); clearTimeout(typing); load({}, "first"); }
  if (event.key === "Escape") articleAt(state.current)?.focus();
});

async function begin() {
  history.replaceState(null, "", `/${location.hash}`); // the token stays in the cookie, not in the address bar
  try {
    state.run = await ask("/api/run");
  } catch (error) {
    say(error.message, true);
    return;
  }
  const run = state.run;
  $("name").textContent = `Review ${run.name}`;
  $("about").textContent = `${run.about} · ${number(run.progress.n)} examples · ${number(run.classes.length)} classes`;
  document.title = `Review ${run.name}`;
  run.classes.forEach((name, label) => form.elements.label.add(new Option(name, label)));
  $("queues").hidden = !run.outside;
  $("queue-labels").textContent = `Labels ${number(run.progress.n - run.outside)}`;
  $("queue-outside").textContent = `Outside their set ${number(run.outside)}`;
  for (const flag of run.flags) if (flag !== "outside") form.elements.flag.add(new Option(flag, flag));
  $("notes").hidden = !run.notes.length;
  $("notes").replaceChildren(...run.notes.map((note) => make("div", "", note)));
  showProgress(run.progress);
  // On a narrow page the examples come first; the filter opens by a touch.
  const narrow = window.matchMedia("(max-width: 48rem)");
  const fold = () => { $("filter-box").open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
  await load(recall(), "first");
}
begin();

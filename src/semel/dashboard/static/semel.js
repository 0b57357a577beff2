// What makes the pages of the dashboard livelier. Every page works without it.

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const say = (text) => { const place = one("#announce"); if (place) place.textContent = text; };

// Times: "12 s ago", counted here, so that the server need not say the same thing anew every second.

function ago(seconds) {
  const away = Math.abs(seconds);
  const [amount, unit] =
    away < 60 ? [away, "s"] : away < 3600 ? [away / 60, "m"] : away < 86400 ? [away / 3600, "h"] : [away / 86400, "d"];
  const text = `${Math.floor(amount)} ${unit}`;
  return seconds < -0.5 ? `in ${text}` : `${text} ago`;
}

// How far this clock is ahead of the server's, in milliseconds; what a page takes to come is not counted.
const ahead = (() => {
  const made = Date.parse(one('meta[name="semel-now"]')?.content);
  const came = performance.timeOrigin + (performance.getEntriesByType("navigation")[0]?.responseStart || 0);
  return Math.abs(came - made) > 2000 ? came - made : 0;
})();

function tick(within = document) {
  for (const time of all("time[data-ago]", within)) {
    const at = Date.parse(time.dateTime);
    if (Number.isNaN(at)) continue;
    const text = ago((Date.now() - ahead - at) / 1000);
    if (time.textContent !== text) time.textContent = text;
  }
}

// Parts: elements with ids take the places of those that have them.

const SCROLLS = ".scroll, .chart-frame, pre"; // what somebody may have moved to read it

function replace(html, wanted = null) {
  const arrived = new DOMParser().parseFromString(html, "text/html");
  const found = wanted
    ? wanted.map((id) => arrived.getElementById(id)).filter(Boolean)
    : [...arrived.body.children].filter((each) => each.id);
  for (const part of found) {
    const old = document.getElementById(part.id);
    if (!old || old.isEqualNode(part)) continue;
    const focus = placeOf(old);
    const open = all("details[open]", old).map((each) => each.id).filter(Boolean);
    const scrolled = all(SCROLLS, old).map((each) => [each.scrollLeft, each.scrollTop]);
    old.replaceWith(part);
    all(SCROLLS, part).forEach((each, place) => { [each.scrollLeft, each.scrollTop] = scrolled[place] ?? [0, 0]; });
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    focus?.(part);
    enliven(part);
  }
  return found.length;
}

// Where the focus was within an element, so that it can be given back to what took its place.
function placeOf(element) {
  const active = document.activeElement;
  if (!active || !element.contains(active)) return null;
  const reach = "a, button, input, select, textarea, summary, [tabindex]";
  const place = [element, ...all(reach, element)].indexOf(active);
  const { id } = active;
  return (part) => (id && part.querySelector(`#${CSS.escape(id)}`) || [part, ...all(reach, part)][place])?.focus();
}

// Live: the element with data-live says where the events are.

let source = null;
let refused = 0; // how often in a row

function listen() {
  source?.close();
  const place = one("[data-live]");
  if (!place || document.hidden) return; // a browser has few lines to a server: a tab that nobody sees takes none
  const url = place.dataset.live;
  const own = new EventSource(url);
  source = own;
  own.addEventListener("open", () => { refused = 0; state("on", "live"); });
  own.addEventListener("parts", (event) => { state("on", "live"); replace(event.data); });
  own.addEventListener("over", () => { own.close(); state("over", "ended"); });
  own.addEventListener("bye", () => { own.close(); location.reload(); });
  own.addEventListener("error", () => {
    state("away", "no connection");
    if (own.readyState === EventSource.CLOSED) again(url, own); // it was refused: signed out, or the server is down
  });
}

// The browser comes back by itself after a line that broke, but not after an answer that was none. So we ask.
function again(url, own, pause = 1000 * 2 ** Math.min(refused++, 4)) {
  setTimeout(async () => {
    if (source !== own) return;
    try {
      const answer = await fetch(location.href, { headers: { "X-Semel-Part": "1" }, cache: "no-store" });
      if (answer.redirected && new URL(answer.url).pathname !== location.pathname) return location.assign(answer.url);
      if (answer.ok) { replace(await answer.text(), all("main [id]").map((each) => each.id)); return listen(); }
    } catch { /* still away */ }
    again(url, own, Math.min(pause * 2, 15000));
  }, pause + Math.random() * 500);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else listen();
});

function state(name, text) {
  for (const each of all(".live")) if (each.dataset.state !== name) { each.dataset.state = name; each.textContent = text; }
}

// Swaps: a link or a form with data-swap="id other-id" replaces these parts instead of the whole page.

async function swap(url, ids, options = {}) {
  const answer = await fetch(url, { ...options, headers: { "X-Semel-Part": "1" } });
  const path = new URL(answer.url).pathname;
  if (path.endsWith("/ui/sign-in")) return location.assign(answer.url);
  const html = await answer.text();
  if (!replace(html, ids)) {
    document.open(); document.write(html); document.close(); // a page of another kind, such as a problem
    return;
  }
  if (answer.redirected || !options.method) history.pushState({ swapped: ids }, "", answer.url);
  say("updated");
  listen();
}

function wanted(element) {
  return element.dataset.swap.split(/\s+/).filter(Boolean).map((id) => id.replace(/^#/, ""));
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-swap]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  swap(link.href, wanted(link)).catch(() => location.assign(link.href));
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  const button = event.submitter;
  const question = button?.dataset.confirm || form.dataset.confirm;
  if (question && !confirm(question)) { event.preventDefault(); return; }
  if (!form.dataset.swap || event.defaultPrevented) return;
  event.preventDefault();
  const fields = new URLSearchParams(new FormData(form, button));
  const action = button?.getAttribute("formaction") || form.getAttribute("action") || location.pathname;
  const url = new URL(action, location.href);
  const ids = wanted(form);
  if ((form.getAttribute("method") || "get").toLowerCase() === "get") {
    for (const [name, value] of [...fields]) if (value === "") fields.delete(name, value);
    url.search = fields.toString();
    swap(url.href, ids).catch(() => location.assign(url.href));
  } else {
    swap(url.href, ids, { method: "POST", body: fields }).catch(() => HTMLFormElement.prototype.submit.call(form));
  }
});

addEventListener("popstate", () => location.reload());

// Small things on a page, or on a part of it that has just arrived.

function enliven(within = document) {
  for (const each of all("[data-copy]", within)) each.hidden = !navigator.clipboard;
  for (const each of all("[data-needs-script]", within)) each.hidden = false;
  tick(within);
}

document.addEventListener("click", async (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    await navigator.clipboard.writeText(copy.dataset.copy);
    const label = copy.textContent;
    copy.textContent = "Copied";
    say("Copied");
    setTimeout(() => { copy.textContent = label; }, 1500);
  }
  const every = event.target.closest("input[data-check-all]");
  if (every) for (const box of all(`input[type="checkbox"][name="${CSS.escape(every.dataset.checkAll)}"]`)) box.checked = every.checked;
  if (event.target.closest("[data-theme-switch]")) switchTheme();
});

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `semel_theme=${root.dataset.theme}; Path=${new URL(one(".brand").href).pathname}; Max-Age=31536000; SameSite=Strict`;
  say(`${root.dataset.theme} colours`);
}

// Keys: / goes to the search, j and k up and down a list, Enter opens what has the focus.

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, [contenteditable]")) return;
  if (event.key === "/") {
    const search = one("[data-search]");
    if (search) { event.preventDefault(); search.focus(); search.select?.(); }
  } else if (event.key === "j" || event.key === "k") {
    const rows = all("[data-row] a[href]:first-of-type, a[data-row]").filter((each, place, list) => {
      const row = each.closest("[data-row]");
      return list.findIndex((other) => other.closest("[data-row]") === row) === place;
    });
    if (!rows.length) return;
    const row = document.activeElement?.closest("[data-row]");
    const now = row ? rows.findIndex((each) => each.closest("[data-row]") === row) : -1;
    rows[Math.max(0, Math.min(rows.length - 1, now + (event.key === "j" ? 1 : -1)))].focus();
    event.preventDefault();
  }
});

// Who signs out in one tab is signed out in all: a page that is open elsewhere asks for itself anew.
const tabs = new BroadcastChannel("semel");
if (location.pathname.endsWith("/ui/sign-in")) tabs.postMessage("signed out");
else tabs.addEventListener("message", () => location.reload());

for (const each of all("[data-theme-switch]")) each.hidden = false;
enliven();
setInterval(tick, 1000);
listen();

// Ticks outlive the rows that they were made in; a log is followed at its end, unless somebody reads further up.

let reading = null; // how far down, of who does

document.addEventListener("scroll", ({ target: log }) => {
  if (log.dataset?.follow !== undefined) reading = log.scrollHeight - log.scrollTop - log.clientHeight < 8 ? null : log.scrollTop;
}, true);

function follow(within = document) {
  for (const log of all("[data-follow]", within)) log.scrollTop = reading ?? log.scrollHeight;
}

new MutationObserver((records) => {
  const elements = (nodes) => [...nodes].filter((node) => node.nodeType === 1);
  const boxes = (nodes) => elements(nodes).flatMap((node) => all('input[type="checkbox"][name="run"]', node));
  const ticked = new Set(records.flatMap((record) => boxes(record.removedNodes)).filter((box) => box.checked).map((box) => box.value));
  for (const box of records.flatMap((record) => boxes(record.addedNodes))) if (ticked.has(box.value)) box.checked = true;
  for (const added of records.flatMap((record) => elements(record.addedNodes))) follow(added);
}).observe(document.body, { childList: true, subtree: true });
follow();

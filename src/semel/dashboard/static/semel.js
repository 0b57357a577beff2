// Live updates, relative times and keyboard shortcuts. Every page works without this script.

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const announce = (text) => { const region = one("#announce"); if (region) region.textContent = text; };

// Relative times ("12 s ago") are computed here, so that the server need not send them again every second.

function duration(seconds) {
  const [amount, unit] =
    seconds < 60 ? [seconds, "s"] : seconds < 3600 ? [seconds / 60, "min"] : seconds < 86400 ? [seconds / 3600, "h"] : [seconds / 86400, "d"];
  return `${Math.floor(amount)} ${unit}`;
}

const relative = (seconds) => seconds < -0.5 ? `in ${duration(-seconds)}` : `${duration(Math.abs(seconds))} ago`;

// How far this clock is ahead of the server's, in milliseconds, without the time that the page took to load.
const skew = (() => {
  const rendered = Date.parse(one('meta[name="semel-now"]')?.content);
  const received = performance.timeOrigin + (performance.getEntriesByType("navigation")[0]?.responseStart || 0);
  return Math.abs(received - rendered) > 2000 ? received - rendered : 0;
})();

function updateTimes(within = document) {
  for (const time of all("time[data-ago], time[data-elapsed]", within)) {
    const at = Date.parse(time.dateTime);
    if (Number.isNaN(at)) continue;
    const seconds = (Date.now() - skew - at) / 1000;
    const text = time.dataset.elapsed === undefined ? relative(seconds) : duration(Math.max(0, seconds));
    if (time.textContent !== text) time.textContent = text;
  }
}

// Replacing: elements take the place of those that have the same ids.

const SCROLLABLE = ".scroll, .chart-frame, pre"; // their scroll positions are kept

function replace(html, wanted = null) {
  const arrived = new DOMParser().parseFromString(html, "text/html");
  const found = wanted
    ? wanted.map((id) => arrived.getElementById(id)).filter(Boolean)
    : [...arrived.body.children].filter((each) => each.id);
  for (const part of found) {
    const old = document.getElementById(part.id);
    if (!old || old.isEqualNode(part)) continue;
    const restoreFocus = focusIn(old);
    const open = all("details[open]", old).map((each) => each.id).filter(Boolean);
    const scrolled = all(SCROLLABLE, old).map((each) => [each.scrollLeft, each.scrollTop]);
    old.replaceWith(part);
    all(SCROLLABLE, part).forEach((each, place) => { [each.scrollLeft, each.scrollTop] = scrolled[place] ?? [0, 0]; });
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    restoreFocus?.(part);
    initialize(part);
  }
  return found.length;
}

// A function that gives the focus of an element's descendant to its counterpart in the replacement.
function focusIn(element) {
  const active = document.activeElement;
  if (!active || !element.contains(active)) return null;
  const focusable = "a, button, input, select, textarea, summary, [tabindex]";
  const place = [element, ...all(focusable, element)].indexOf(active);
  const { id } = active;
  return (part) => (id && part.querySelector(`#${CSS.escape(id)}`) || [part, ...all(focusable, part)][place])?.focus();
}

// Live updates: data-live is the address of the server-sent events.

let source = null;
let failures = 0; // consecutive

function listen() {
  source?.close();
  const element = one("[data-live]");
  if (!element || document.hidden) return; // browsers limit connections per server: a hidden tab uses none
  const stream = new EventSource(element.dataset.live);
  source = stream;
  stream.addEventListener("open", () => { failures = 0; showState("on", "live"); });
  stream.addEventListener("replace", (event) => { showState("on", "live"); replace(event.data); });
  stream.addEventListener("end", () => { stream.close(); showState("ended", "ended"); });
  stream.addEventListener("signed-out", () => { stream.close(); location.reload(); });
  stream.addEventListener("error", () => {
    showState("offline", "offline");
    if (stream.readyState === EventSource.CLOSED) reconnect(stream); // refused: signed out, or the server is down
  });
}

// Browsers reconnect after a broken connection, but not after a refused one.
function reconnect(stream, pause = 1000 * 2 ** Math.min(failures++, 4)) {
  setTimeout(async () => {
    if (source !== stream) return;
    try {
      const response = await fetch(location.href, { headers: { "X-Semel-Part": "1" }, cache: "no-store" });
      if (response.redirected && new URL(response.url).pathname !== location.pathname) return location.assign(response.url);
      if (response.ok) { replace(await response.text(), all("main [id]").map((each) => each.id)); return listen(); }
    } catch { /* still offline */ }
    reconnect(stream, Math.min(pause * 2, 15000));
  }, pause + Math.random() * 500);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else listen();
});

function showState(name, text) {
  for (const each of all(".live")) if (each.dataset.state !== name) { each.dataset.state = name; each.textContent = text; }
}

// A link or a form with data-swap="id other-id" replaces these elements instead of the whole page.

async function swap(url, ids, options = {}) {
  const response = await fetch(url, { ...options, headers: { "X-Semel-Part": "1" } });
  if (new URL(response.url).pathname.endsWith("/ui/sign-in")) return location.assign(response.url);
  const html = await response.text();
  if (!replace(html, ids)) {
    document.open(); document.write(html); document.close(); // another page, such as an error
    return;
  }
  if (response.redirected || !options.method) history.pushState({ swapped: ids }, "", response.url);
  announce("Updated");
  listen();
}

const swappedIds = (element) => element.dataset.swap.split(/\s+/).filter(Boolean);

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-swap]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  swap(link.href, swappedIds(link)).catch(() => location.assign(link.href));
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
  const ids = swappedIds(form);
  if ((form.getAttribute("method") || "get").toLowerCase() === "get") {
    for (const [name, value] of [...fields]) if (value === "") fields.delete(name, value);
    url.search = fields.toString();
    swap(url.href, ids).catch(() => location.assign(url.href));
  } else {
    swap(url.href, ids, { method: "POST", body: fields }).catch(() => HTMLFormElement.prototype.submit.call(form));
  }
});

addEventListener("popstate", () => location.reload());

// Prepares a page, or a part of it that was just inserted.
function initialize(within = document) {
  for (const each of all("[data-copy]", within)) each.hidden = !navigator.clipboard;
  for (const each of all("[data-needs-script]", within)) each.hidden = false;
  updateTimes(within);
}

document.addEventListener("click", async (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    await navigator.clipboard.writeText(copy.dataset.copy);
    const label = copy.textContent;
    copy.textContent = "Copied";
    announce("Copied");
    setTimeout(() => { copy.textContent = label; }, 1500);
  }
  const checkAll = event.target.closest("input[data-check-all]");
  if (checkAll) for (const box of all(`input[type="checkbox"][name="${CSS.escape(checkAll.dataset.checkAll)}"]`)) box.checked = checkAll.checked;
  if (event.target.closest("[data-theme-switch]")) switchTheme();
});

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `semel_theme=${root.dataset.theme}; Path=${new URL(one(".brand").href).pathname}; Max-Age=31536000; SameSite=Strict`;
  announce(`${root.dataset.theme} theme`);
}

// Keyboard shortcuts: / focuses the search, j and k move down and up a list, Enter opens the focused run.

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

// Signing out in one tab signs out all: pages in other tabs reload.
const tabs = new BroadcastChannel("semel");
if (location.pathname.endsWith("/ui/sign-in")) tabs.postMessage("signed out");
else tabs.addEventListener("message", () => location.reload());

for (const each of all("[data-theme-switch]")) each.hidden = false;
initialize();
setInterval(updateTimes, 1000);
listen();

// Selected rows stay selected when they are replaced. A log follows its end, unless somebody has scrolled up.

let scrolledTo = null;

document.addEventListener("scroll", ({ target: log }) => {
  if (log.dataset?.follow !== undefined) scrolledTo = log.scrollHeight - log.scrollTop - log.clientHeight < 8 ? null : log.scrollTop;
}, true);

function follow(within = document) {
  for (const log of all("[data-follow]", within)) log.scrollTop = scrolledTo ?? log.scrollHeight;
}

new MutationObserver((records) => {
  const elements = (nodes) => [...nodes].filter((node) => node.nodeType === 1);
  const boxes = (nodes) => elements(nodes).flatMap((node) => all('input[type="checkbox"][name="run"]', node));
  const selected = new Set(records.flatMap((record) => boxes(record.removedNodes)).filter((box) => box.checked).map((box) => box.value));
  for (const box of records.flatMap((record) => boxes(record.addedNodes))) if (selected.has(box.value)) box.checked = true;
  for (const added of records.flatMap((record) => elements(record.addedNodes))) follow(added);
}).observe(document.body, { childList: true, subtree: true });
follow();

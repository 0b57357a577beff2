// Double-click protection, live shell commands and countdowns. Every form works without this script.

const form = document.querySelector("#submit-form");

// A second click does not send the form again. (Its key would find the same run anyway.)
document.addEventListener("submit", (event) => {
  if (event.defaultPrevented || !event.target.querySelector("[data-once]")) return;
  if (event.target.dataset.sent) { event.preventDefault(); return; }
  if (!event.submitter?.hasAttribute("formaction")) event.target.dataset.sent = "yes";
});
addEventListener("pageshow", () => { for (const each of document.querySelectorAll("form[data-sent]")) delete each.dataset.sent; });

// The shell commands follow what is typed. The server writes them, so that quoting is implemented once.
let timer = 0;
let latest = 0;

async function updateCommands() {
  const turn = ++latest;
  const response = await fetch(form.dataset.commands, {
    method: "POST", body: new URLSearchParams(new FormData(form)), headers: { "X-Semel-Part": "1" },
  });
  if (!response.ok || turn !== latest || new URL(response.url).pathname.endsWith("/ui/sign-in")) return;
  const arrived = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const id of ["curl", "semel"]) {
    const [old, updated] = [document.getElementById(id), arrived.getElementById(id)];
    if (!old || !updated) continue;
    old.textContent = updated.textContent;
    const button = old.nextElementSibling?.querySelector("[data-copy]");
    if (button) button.dataset.copy = updated.textContent;
  }
}

if (form) {
  for (const each of document.querySelectorAll("[data-without-script]")) each.hidden = true;
  const updateSoon = () => {
    clearTimeout(timer);
    timer = setTimeout(() => updateCommands().catch(() => { /* offline: the commands stay as they were */ }), 400);
  };
  form.addEventListener("input", updateSoon);
  // What was typed before this script arrived, or what the browser kept from an earlier visit.
  if ([...form.elements].some((each) => each.value !== each.defaultValue && each.defaultValue !== undefined)) updateSoon();
}

// Reservations count down to their expiry.
function countDown() {
  for (const each of document.querySelectorAll("time[data-countdown]")) {
    const left = Math.floor((Date.parse(each.dateTime) - Date.now()) / 1000);
    const [minutes, seconds] = [Math.floor(left / 60), left % 60];
    each.textContent = left < 0 ? "expired" : minutes ? `in ${minutes} min ${seconds} s` : `in ${seconds} s`;
  }
}
if (document.querySelector("time[data-countdown]")) { countDown(); setInterval(countDown, 1000); }

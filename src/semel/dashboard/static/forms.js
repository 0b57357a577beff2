// What makes the forms of the dashboard quicker to use. They work without it.

const form = document.querySelector("#submit-form");

// A form that is on its way is not sent again by a second click. Its key would find the same run anyway.
document.addEventListener("submit", (event) => {
  if (event.defaultPrevented || !event.target.querySelector("[data-once]")) return;
  if (event.target.dataset.sent) { event.preventDefault(); return; }
  if (!event.submitter?.hasAttribute("formaction")) event.target.dataset.sent = "yes";
});
addEventListener("pageshow", () => { for (const each of document.querySelectorAll("form[data-sent]")) delete each.dataset.sent; });

// The lines for a shell follow what is typed. The server writes them, so that there is one place that knows how to quote.
let pause = 0;
let asked = 0;

async function write() {
  const turn = ++asked;
  const answer = await fetch(form.dataset.lines, {
    method: "POST", body: new URLSearchParams(new FormData(form)), headers: { "X-Semel-Part": "1" },
  });
  if (!answer.ok || turn !== asked || new URL(answer.url).pathname.endsWith("/ui/sign-in")) return;
  const arrived = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ["curl", "semel"]) {
    const [old, anew] = [document.getElementById(id), arrived.getElementById(id)];
    if (!old || !anew) continue;
    old.textContent = anew.textContent;
    const button = old.nextElementSibling?.querySelector("[data-copy]");
    if (button) button.dataset.copy = anew.textContent;
  }
}

if (form) {
  for (const each of document.querySelectorAll("[data-without-script]")) each.hidden = true;
  form.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => write().catch(() => { /* the lines stay as they were */ }), 400);
  });
}

// Slots that are held, second by second.
function count() {
  for (const each of document.querySelectorAll("time[data-countdown]")) {
    const left = Math.floor((Date.parse(each.dateTime) - Date.now()) / 1000);
    const [minutes, seconds] = [Math.floor(left / 60), left % 60];
    each.textContent = left < 0 ? "has ended" : minutes ? `in ${minutes} m ${seconds} s` : `in ${seconds} s`;
  }
}
if (document.querySelector("time[data-countdown]")) { count(); setInterval(count, 1000); }

"use strict";
/* Events of the server -> the page: parts of it, which are HTML that the server has escaped, and numbers for charts. */
document.addEventListener("DOMContentLoaded", () => {
  const charts = {};

  function replacePart(name, html) {
    const part = document.querySelector(`[data-part="${name}"]`);
    if (!part || part.dataset.text === html) return;
    const nameOf = (one) => one.id || one.querySelector("summary").textContent;
    const open = [...part.querySelectorAll("details[open]")].map(nameOf);
    const focused = part.contains(document.activeElement) ? document.activeElement.closest("details, a") : null;
    const focusedId = focused && (focused.id || focused.getAttribute("href"));
    part.innerHTML = html;
    part.dataset.text = html;
    for (const one of part.querySelectorAll("details")) {
      if (open.includes(nameOf(one))) one.open = true;
      if (focusedId && one.id === focusedId) one.querySelector("summary").focus({ preventScroll: true });
    }
  }

  function receive(event) {
    let drawn = false;
    for (const [name, value] of Object.entries(JSON.parse(event.data))) {
      const [kind, key] = name.split(":");
      if (kind === "part") replacePart(key, value);
      else if (kind === "chart") { charts[key] = value; drawn = true; }
      else if (kind === "progress") showProgress(value);
    }
    if (drawn) steadygrad.show({ run0: charts });
  }

  function showProgress(share) {
    document.body.dataset.progress = String(share);
    document.getElementById("reading").style.width = share < 1 ? `${100 * share}%` : "0";
  }

  new EventSource(document.body.dataset.events).addEventListener("message", receive);
});

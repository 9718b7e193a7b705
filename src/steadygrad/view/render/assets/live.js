"use strict";
/* Events of the server -> the page: parts of it, which are HTML that the server has escaped, and numbers for charts. */
document.addEventListener("DOMContentLoaded", () => {
  const charts = {};

  function replacePart(name, html) {
    const part = document.querySelector(`[data-part="${name}"]`);
    // Compared with what was sent: innerHTML reads differently once scripts have added to it
    if (!part || part.dataset.text === html) return;
    if (part.querySelector("table.listed") && replaceRows(part, html)) return;
    const nameOf = (one) => one.id || one.querySelector("summary").textContent;
    // Read before the HTML is replaced, which forgets what the user has opened, ticked and focused
    const open = [...part.querySelectorAll("details[open]")].map(nameOf);
    const focused = part.contains(document.activeElement) ? document.activeElement.closest("details, a") : null;
    const focusedId = focused && (focused.id || focused.getAttribute("href"));
    const checked = [...part.querySelectorAll("input:checked")].map((one) => one.value);
    part.innerHTML = html;
    part.dataset.text = html;
    for (const one of part.querySelectorAll('input[name="run"]')) one.checked = checked.includes(one.value);
    for (const one of part.querySelectorAll("details")) {
      if (open.includes(nameOf(one))) one.open = true;
      if (focusedId && one.id === focusedId) one.querySelector("summary").focus({ preventScroll: true });
    }
  }

  /* The list changes every second: a row that stays keeps its box, its focus and a click that has begun. */
  function replaceRows(part, html) {
    // A document of its own: nothing in it is loaded or run before its rows are moved over
    const next = new DOMParser().parseFromString(html, "text/html").querySelector("table.listed");
    if (!next) return false;
    const nameOf = (row) => row.querySelector("input").value;
    const body = part.querySelector("table.listed").tBodies[0];
    const known = new Map([...body.rows].map((row) => [nameOf(row), row]));
    const rows = [...next.tBodies[0].rows].map((row) => {
      const old = known.get(nameOf(row));
      if (!old) return row;
      [...row.cells].slice(1).forEach((cell, i) => old.cells[i + 1].replaceChildren(...cell.childNodes));
      return old;
    });
    const isSame = rows.length === body.rows.length && rows.every((row) => body.contains(row));
    if (!isSame) body.replaceChildren(...rows);
    part.dataset.text = html;
    return true;
  }

  function receive(event) {
    const changed = {};
    for (const [name, value] of Object.entries(JSON.parse(event.data))) {
      const [kind, key, part] = name.split(":");
      if (kind === "part") replacePart(key, value);
      else if (kind === "chart") { charts[key] = { ...charts[key], [part]: value }; changed[key] = charts[key]; }
      else if (kind === "progress") showProgress(value);
    }
    steadygrad.readyTables();
    if (Object.keys(changed).length) steadygrad.show(changed);
  }

  function showProgress(share) {
    document.body.dataset.progress = String(share);
    document.getElementById("reading").style.width = share < 1 ? `${100 * share}%` : "0";
  }

  new EventSource(document.body.dataset.events).addEventListener("message", receive);
});

"use strict";
/* Numbers (the JSON beside this script, or what the live page is sent) -> charts; keys, buttons and tables of the page.
   Words are HTML already, escaped by whoever made the page; everything written here goes through textContent. */
const steadygrad = (() => {
  const MOVES = { // shares of the width, at its left and right end
    ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-0.3, 0.3],
  };
  const ROUND = ["--blue", "--orange", "--green", "--purple", "--red", "--teal", "--amber"];
  let runs = {};
  const options = { smooth: 0, scale: "auto", across: "step" };
  const hidden = new Set();   // runs taken out of the comparison
  const zooms = {};           // group of charts that move together -> what it shows, when not all
  const dirty = new Set();    // figures to draw when they come into view
  const printing = { on: false };
  // Keyed by the objects themselves: a piece that is not sent again keeps its series, a replaced one is freed
  let known = new WeakMap();  // points -> their series, in the axis shown
  let pictures = new WeakMap();

  const has = (points) => points && points.x.length > 0;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isTime = () => options.across === "time";
  const figures = () => [...document.querySelectorAll("figure.chart")];
  const groupOf = (figure) => figure.dataset.run || "compared";

  /* --- data -> what a chart shows --- */

  const toX = (run, step) => (isTime() ? Series.timeAt(run.clock || { x: [], y: [] }, step) : step);

  function seriesOf(run, points) {
    if (!known.has(points)) known.set(points, Series.make(isTime() ? points.x.map((step) => toX(run, step)) : points.x, points.y));
    return known.get(points);
  }

  const spread = (values) => {
    let low = Infinity, high = 0;
    for (const value of values) { if (value <= 0) return 1; if (value < low) low = value; if (value > high) high = value; }
    return high / low;
  };
  const isLogLoss = (all) => (options.scale === "auto" ? all.some((points) => spread(points.y) > 100) : options.scale === "log");

  function line(run, points, name, paint, more) {
    const raw = { name, series: seriesOf(run, points), paint, points, ...more };
    if (!options.smooth || !raw.canSmooth || points.x.length < 3) return [raw];
    const series = Series.make(raw.series.x, Series.smooth(points.y, options.smooth));
    return [{ ...raw, faint: true, isExtra: true }, { ...raw, series, width: 2 }];
  }

  const wholeOf = (run) => {
    const last = toX(run, Math.max(1, run.last_step));
    return [isTime() ? 0 : -0.01 * last, last * 1.01];
  };
  const rowsOf = (run) => run.marks.map((mark) => ({ ...mark, steps: mark.x, x: mark.x.map((step) => toX(run, step)) }));

  function drawLoss(run) {
    const loss = run.curves.loss;
    if (!has(loss) && !run.marks.length) return null;
    const lines = has(loss) ? line(run, loss, "loss", "--blue", { canSmooth: true }) : [];
    return { lines, marks: rowsOf(run), log: has(loss) && isLogLoss([loss]), height: 300 + Chart.ROW * run.marks.length };
  }

  function drawNorm(run) {
    const { grad_norm: norm, applied_norm: after } = run.curves;
    if (!has(norm)) return null;
    const lines = line(run, norm, "norm", "--blue", { canSmooth: true });
    if (has(after)) lines.push(...line(run, after, "after clipping", "--orange", { kind: "dots" }));
    if (run.threshold) {
      const ends = { x: [0, run.last_step], y: [run.threshold, run.threshold] };
      lines.push(...line(run, ends, "clip threshold", "--red", { dash: "6 4", width: 1.2 }));
    }
    return { lines, through: rowsOf(run), log: true, height: 260 };
  }

  /* The paint and the dashes of the nth line of a chart: no two of the first 28 look alike. */
  const look = (n) => [ROUND[n % ROUND.length], { dash: Chart.DASHES[Math.floor(n / ROUND.length) % Chart.DASHES.length], canSmooth: true }];

  function drawNamed(run, numbers, kind) {
    const names = Object.keys(numbers || {}).filter((name) => has(numbers[name]));
    if (!names.length) return null;
    const lines = names.flatMap((name, i) => { const [paint, more] = look(i); return line(run, numbers[name], name, paint, { ...more, kind }); });
    const log = names.some((name) => spread(numbers[name].y) > 100);
    return { lines, log, height: 260 };
  }

  function drawValidation(run) {
    const drawn = drawNamed(run, run.validation, "points");
    if (!drawn) return null;
    const trained = run.curves.loss;
    const soft = has(trained) ? line(run, trained, "training loss", "--soft", { width: 1, faint: true }) : [];
    const all = [...Object.values(run.validation), ...(has(trained) ? [trained] : [])];
    return { ...drawn, lines: [...soft, ...drawn.lines], log: isLogLoss(all) };
  }

  function drawSteps(run, points, name, paint) {
    if (!has(points)) return null;
    const log = spread(points.y) > 100; // one jump must not flatten the rest
    return { lines: line(run, points, name, paint, { kind: "steps" }), log, zero: !log, height: 220 };
  }

  function drawShare(run) {
    const { clipped, skipped } = run.shares;
    if (!has(clipped)) return null;
    const lines = [...line(run, clipped, "clipped", "--blue", { kind: "area" }), ...line(run, skipped, "skipped", "--orange", { kind: "area", dash: "5 3" })];
    return { lines, percent: true, zero: true, height: 220 };
  }

  function drawAll(find, isLog) {
    const all = Object.entries(runs).filter(([key, run]) => has(find(run)) && !hidden.has(key));
    if (!all.length) return null;
    const lines = all.flatMap(([key, run]) => {
      const [paint, more] = look(Object.keys(runs).indexOf(key));
      return line(run, find(run), run.name, paint, more);
    });
    return { lines, log: isLog(all.map(([, run]) => find(run))), height: 320, whole: all.map(([, run]) => wholeOf(run)).reduce((a, b) => [Math.min(a[0], b[0]), Math.max(a[1], b[1])]) };
  }

  /* One scale for rates that differ tenfold would draw all but the highest along the bottom. */
  const areFarApart = (all) => spread(all.map((points) => points.y.reduce((a, b) => Math.max(a, b), 0))) >= 10;

  const DRAW = {
    loss: drawLoss, validation: drawValidation, norm: drawNorm, share: drawShare,
    metrics: (run) => drawNamed(run, run.metrics, "points"), extra: (run) => drawNamed(run, run.extra),
    rate: (run) => drawSteps(run, run.curves.learning_rate, "learning rate", "--teal"),
    scale: (run) => drawSteps(run, run.curves.loss_scale, "loss scale", "--purple"),
    layers: (run, figure) => drawCells(run, run.norms, "norm", null, figure),
    ratios: (run, figure) => drawCells(run, run.ratios, "ratio", -30, figure),
    compare_loss: () => drawAll((run) => run.curves.loss, isLogLoss),
    compare_validation: () => drawAll((run) => Object.values(run.validation || {})[0], isLogLoss),
    compare_norm: () => drawAll((run) => run.curves.grad_norm, () => true),
    compare_rate: () => drawAll((run) => run.curves.learning_rate, areFarApart),
  };

  /* --- maps --- */

  function drawCells(run, table, what, centre, figure) {
    if (!table || !table.x.length) return null;
    const rows = chooseRows(table, figure);
    const widths = table.x.slice(1).map((step, i) => step - table.x[i]).sort((a, b) => a - b);
    const last = table.x[table.x.length - 1] + (widths[widths.length >> 1] || 1);
    const edges = [table.x[0], last].map((step) => toX(run, step));
    const height = Math.max(120, Math.min(760, 46 + 16 * rows.length));
    const left = Math.max(70, Math.min(210, (figure.clientWidth || 800) * 0.24));
    const cells = { picture: paintCells(table, rows, centre, last), steps: table.x, labels: rows.map((i) => table.names[i]), rows, edges, table, what };
    return { cells, lines: [], height, left };
  }

  function chooseRows(table, figure) {
    const find = figure.querySelector("input.find"), order = figure.querySelector("select.order");
    const text = find ? find.value.toLowerCase() : "";
    const rows = table.names.map((_, i) => i).filter((i) => table.names[i].toLowerCase().includes(text));
    const largest = (i) => Math.max(...table.z[i].map((z) => (z === null ? -Infinity : z)));
    if (order && order.value === "largest") rows.sort((a, b) => largest(b) - largest(a));
    if (order && order.value === "bad") rows.sort((a, b) => table.bad[b].length - table.bad[a].length);
    if (order && order.value === "name") rows.sort((a, b) => table.names[a].localeCompare(table.names[b]));
    return rows.length ? rows : table.names.map((_, i) => i);
  }

  function paintCells(table, rows, centre, last) {
    const key = `${rows.join()}|${document.documentElement.dataset.theme}|${color("--heat-mid")}|${isTime()}`;
    const cached = pictures.get(table);
    if (cached && cached.key === key) return cached.url;
    const values = table.z.flat().filter((z) => z !== null).sort((a, b) => a - b);
    const middle = centre === null ? values[values.length >> 1] || 0 : centre;
    const [low, mid, high] = ["--heat-low", "--heat-mid", "--heat-high"].map((name) => parse(color(name)));
    const purple = color("--purple");
    const canvas = document.createElement("canvas");
    const width = Math.max(720, Math.min(1440, 6 * table.x.length)), tall = 6, span = last - table.x[0];
    canvas.width = width; canvas.height = tall * rows.length;
    const context = canvas.getContext("2d");
    const place = (step) => Math.round(((step - table.x[0]) / span) * width);
    const paint = (z) => {
      const share = Math.max(-1, Math.min(1, (z - middle) / 40));
      const end = share < 0 ? low : high;
      return `rgb(${mid.map((one, n) => Math.round(one + (end[n] - one) * Math.abs(share)))})`;
    };
    const dot = Math.ceil(width / 200); // or a narrow screen, which leaves out pixels, would lose it
    rows.forEach((row, line) => {
      const bad = new Set(table.bad[row]);
      let fill = null; // a step without one finite value says nothing about those after it: what was before goes on
      table.x.forEach((step, i) => {
        const z = table.z[row][i], from = place(step), to = place(table.x[i + 1] ?? last);
        fill = z !== null ? paint(z) : bad.has(i) ? fill : null;
        if (fill === null) return;
        context.fillStyle = fill;
        context.fillRect(from, line * tall, Math.max(1, to - from), tall);
      });
      context.fillStyle = purple;
      for (const i of bad) context.fillRect(place(table.x[i] + table.width / 2) - (dot >> 1), line * tall + 2, dot, 2);
    });
    const url = canvas.toDataURL("image/png");
    pictures.set(table, { key, url });
    return url;
  }

  const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

  /* --- figures --- */

  function describe(figure) {
    const run = runs[figure.dataset.run];
    if (figure.dataset.run && !(run && run.curves)) return null;
    const drawn = DRAW[figure.dataset.chart](run, figure);
    if (!drawn) return null;
    const whole = drawn.whole || wholeOf(run);
    return { ...drawn, whole, range: zooms[groupOf(figure)] || whole, isTime: isTime() };
  }

  function draw(figure) {
    dirty.delete(figure);
    const spec = describe(figure);
    figure.hidden = spec === null;
    if (spec === null) return;
    const plot = figure.querySelector(".plot");
    if (!plot.dataset.ready) listen(plot, figure);
    Chart.draw(plot, spec);
    const zoomed = figure.querySelector('[data-move="0"]');
    if (zoomed) zoomed.disabled = !zooms[groupOf(figure)];
    writeLegend(figure, spec);
    figure.querySelector("figcaption > span").hidden = Boolean(spec.marks) && !spec.marks.length; // it is about marks
  }

  /* Those in view now, the others when they come into view; one that has nothing to show stays hidden. */
  function drawEverything() {
    for (const figure of figures()) {
      // A hidden figure has no box: only drawing it shows whether there is something in it now
      const isShown = printing.on || isNear(figure) || figure.hidden;
      if (isShown) draw(figure); else dirty.add(figure);
    }
    paintSwatches();
  }

  function isNear(figure) {
    const box = figure.getBoundingClientRect();
    return box.bottom > -400 && box.top < innerHeight + 400;
  }

  let waiting = false;
  function drawSoon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawEverything(); });
  }

  const drawDirty = () => { for (const figure of [...dirty]) if (isNear(figure)) draw(figure); };

  function writeLegend(figure, spec) {
    const legend = figure.querySelector(".legend");
    const own = spec.lines.filter((one) => !one.isExtra);
    const lines = own.length > 1 ? own.map((one) => [swatch(one.paint, one.dash, one.kind), one.name]) : [];
    const marks = (spec.marks || []).map((mark) => {
      const total = mark.counts.reduce((a, b) => a + b, 0);
      return [symbol(mark), `${mark.name} ${total.toLocaleString("en-US")}×`];
    });
    legend.replaceChildren(...[...lines, ...marks].map(([sign, text]) => {
      const item = document.createElement("span");
      item.className = "item";
      item.append(sign, text);
      return item;
    }));
    legend.hidden = !legend.children.length;
    if (spec.cells) { legend.hidden = false; legend.replaceChildren(...scaleOf(spec.cells)); }
  }

  const icon = (size) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("width", size); svg.setAttribute("height", 12); svg.setAttribute("aria-hidden", "true");
    return svg;
  };
  function swatch(paint, dash, kind) {
    const svg = icon(24);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", kind === "dots" ? "M5,6h0M12,6h0M19,6h0" : "M1,6H23");
    path.setAttribute("style", `stroke:var(${paint});stroke-width:${kind === "dots" ? 4 : 2.5};stroke-linecap:${kind === "dots" ? "round" : "butt"};fill:none`);
    if (dash) path.setAttribute("stroke-dasharray", dash);
    svg.append(path);
    return svg;
  }
  function symbol(mark) {
    const svg = icon(12);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", Chart.SYMBOLS[mark.symbol] || Chart.SYMBOLS.circle);
    path.setAttribute("transform", "translate(6,6)");
    path.setAttribute("style", `stroke:var(${mark.paint});stroke-width:1.8;fill:${Chart.OPEN.includes(mark.symbol) ? "none" : `var(${mark.paint})`}`);
    svg.append(path);
    return svg;
  }
  function scaleOf(cells) {
    const words = cells.what === "norm" ? ["far below", "far above"] : ["barely moves", "moves too fast"];
    const bar = document.createElement("span");
    bar.className = "heat";
    const [low, high] = words.map((text) => { const one = document.createElement("span"); one.className = "item"; one.textContent = text; return one; });
    const bad = document.createElement("span");
    bad.className = "item";
    bad.append(symbol({ symbol: "dash", paint: "--purple" }), "held NaN or Inf");
    return cells.table.bad.some((one) => one.length) ? [low, bar, high, bad] : [low, bar, high];
  }

  function paintSwatches() {
    for (const box of document.querySelectorAll("[data-swatch]")) {
      const n = Object.keys(runs).indexOf(box.dataset.swatch);
      if (n >= 0) { const [paint, { dash }] = look(n); box.replaceChildren(swatch(paint, dash)); }
    }
    for (const box of document.querySelectorAll("[data-show]")) box.checked = !hidden.has(box.dataset.show);
  }

  /* --- zoom --- */

  function zoom(figure, range) {
    const group = groupOf(figure);
    if (range && range[1] - range[0] > 1e-9) zooms[group] = range; else delete zooms[group];
    for (const one of figures()) if (groupOf(one) === group) dirty.add(one);
    requestAnimationFrame(drawDirty);
  }

  function move(figure, key) {
    const plot = figure.querySelector(".plot");
    if (!plot.state) return false;
    const { from, to } = plot.state, size = to - from, by = MOVES[key];
    if (key === "0") zoom(figure, null);
    else if (by) zoom(figure, [from + by[0] * size, to + by[1] * size]);
    return key === "0" || Boolean(by);
  }

  /* --- mouse, touch, keys in a chart --- */

  function listen(plot, figure) {
    plot.dataset.ready = "1";
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    plot.append(tip);
    let start = null;
    const place = (event) => event.clientX - plot.getBoundingClientRect().left;
    const valueAt = (pixel) => { const { frame, from, to } = plot.state; return from + ((pixel - frame.left) / (frame.right - frame.left)) * (to - from); };
    plot.addEventListener("pointerdown", (event) => { if (event.button === 0) start = place(event); });
    plot.addEventListener("pointermove", (event) => {
      if (!plot.state) return;
      if (start !== null && Math.abs(place(event) - start) > 5) {
        // Only once it is a drag: a captured pointer would take the click away from the mark under it
        if (!plot.hasPointerCapture(event.pointerId)) plot.setPointerCapture(event.pointerId);
        const { frame, select } = plot.state;
        const ends = [start, place(event)].map((one) => Math.max(frame.left, Math.min(frame.right, one))).sort((a, b) => a - b);
        select.setAttribute("x", ends[0]); select.setAttribute("width", ends[1] - ends[0]); select.setAttribute("visibility", "visible");
      }
      showTip(plot, figure, tip, place(event), event);
    });
    const leave = () => { tip.hidden = true; setCursor(figure, null); };
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("pointercancel", () => { start = null; leave(); });
    plot.addEventListener("pointerup", (event) => {
      if (start === null || !plot.state) return;
      const end = place(event), begin = start;
      start = null;
      plot.state.select.setAttribute("visibility", "hidden");
      if (Math.abs(end - begin) > 5) { zoom(figure, [begin, end].map(valueAt).sort((a, b) => a - b)); return; }
      const mark = event.target.closest && event.target.closest(".mark");
      if (mark) openIncident(figure, Number(mark.dataset.step));
    });
    plot.addEventListener("dblclick", () => zoom(figure, null));
    plot.addEventListener("keydown", (event) => { if (move(figure, event.key)) event.preventDefault(); });
  }

  function showTip(plot, figure, tip, pixel, event) {
    const { frame, from, to, spec } = plot.state;
    if (pixel < frame.left || pixel > frame.right) { tip.hidden = true; setCursor(figure, null); return; }
    const value = from + ((pixel - frame.left) / (frame.right - frame.left)) * (to - from);
    const rows = spec.cells ? tellCell(plot, spec.cells, value, event) : tellLines(spec, value);
    if (!rows) { tip.hidden = true; return; }
    tip.replaceChildren(...rows.map((text, i) => { const one = document.createElement(i ? "div" : "b"); one.textContent = text; return one; }));
    tip.hidden = false;
    const side = pixel > (frame.left + frame.right) / 2;
    tip.style.left = side ? "" : `${pixel + 14}px`;
    tip.style.right = side ? `${plot.clientWidth - pixel + 14}px` : "";
    setCursor(figure, value);
  }

  const tellPlace = (value) => (isTime() ? Chart.spellTime(value) : `step ${Chart.spellStep(value)}`);

  function tellLines(spec, value) {
    const own = spec.lines.filter((one) => one.series.x.length && !one.isExtra);
    if (!own.length) return null;
    const near = own.map((one) => Series.nearest(one.series, value));
    const first = own[0].series.x[near[0]];
    const reach = (spec.range[1] - spec.range[0]) / 40;
    const told = own.map((one, n) => [one, near[n]]).filter(([one, i], n) => n === 0 || one.kind === "steps" || Math.abs(one.series.x[i] - first) <= reach || one.series.x.length === 2);
    const rows = told.slice(0, 14).map(([one, i]) => `${one.name} ${spec.percent ? `${Chart.spell(100 * one.series.y[i])} %` : Chart.spell(one.series.y[i])}`);
    return [tellPlace(first), ...rows];
  }

  function tellCell(plot, cells, value, event) {
    const { frame, row } = plot.state;
    const line = Math.floor((event.clientY - plot.getBoundingClientRect().top - frame.top) / row);
    if (line < 0 || line >= cells.rows.length) return null;
    const run = runs[plot.closest("figure").dataset.run];
    let column = 0;
    const at = cells.rows[line];
    const reach = (plot.state.to - plot.state.from) / 200; // of a dot, whose step says nothing about those after it
    const isNear = (i) => cells.table.z[at][i] !== null || value - toX(run, cells.table.x[i]) <= reach;
    cells.table.x.forEach((step, i) => { if (toX(run, step) <= value + reach / 2 && isNear(i)) column = i; });
    const z = cells.table.z[at][column];
    const told = z === null ? "no finite value" : `${cells.what} ${Chart.spell(10 ** (z / 10), 2)}`;
    const bad = cells.table.bad[at].includes(column) ? ["held NaN or Inf"] : [];
    return [`step ${Chart.spellStep(cells.table.x[column])}`, cells.table.names[at], told, ...bad];
  }

  function setCursor(figure, value) {
    for (const one of figures()) {
      const { state } = one.querySelector(".plot");
      if (!state || groupOf(one) !== groupOf(figure)) continue;
      const isThere = value !== null && value >= state.from && value <= state.to;
      state.cursor.setAttribute("visibility", isThere ? "visible" : "hidden");
      if (isThere) { state.cursor.setAttribute("x1", state.x(value)); state.cursor.setAttribute("x2", state.x(value)); }
    }
  }

  /* --- saving a chart --- */

  function save(figure, kind) {
    const name = `${(runs[figure.dataset.run] || { name: "runs" }).name}-${figure.dataset.chart}`.replace(/[^\w.-]+/g, "_");
    const { svg, spec, width } = figure.querySelector(".plot").state;
    if (kind === "csv") { offer(new Blob([toCsv(spec)], { type: "text/csv" }), `${name}.csv`); return; }
    const text = toSvg(svg, figure, spec);
    if (kind === "svg") { offer(new Blob([text], { type: "image/svg+xml" }), `${name}.svg`); return; }
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = 2 * width; canvas.height = 2 * spec.height + 60;
      const context = canvas.getContext("2d");
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => offer(blob, `${name}.png`));
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  }

  function offer(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    // The download starts after this returns: freed at once, it would find nothing
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  /* A picture that stands alone: colours and fonts written out, with title and legend above. */
  function toSvg(svg, figure, spec) {
    const copy = svg.cloneNode(true);
    const width = Number(svg.getAttribute("width")), height = spec.height + 30;
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("viewBox", `0 -30 ${width} ${height}`);
    copy.setAttribute("height", height);
    copy.querySelectorAll(".cursor, .select").forEach((one) => one.remove());
    const legend = [...figure.querySelectorAll(".legend .item")].map((one) => one.textContent).join(" · ");
    const title = document.createElementNS("http://www.w3.org/2000/svg", "text");
    title.setAttribute("x", 8); title.setAttribute("y", -10); title.setAttribute("class", "tick");
    title.textContent = `${figure.querySelector("figcaption b").textContent}${legend ? `: ${legend}` : ""}`;
    const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ x: 0, y: -30, width, height, style: "fill:var(--card)" })) back.setAttribute(key, value);
    const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
    style.textContent = "text{font:11px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--grid)}.axis{stroke:var(--line)}.through{stroke-dasharray:2 3}.mark{stroke-width:1.8}";
    copy.prepend(style, back, title);
    return new XMLSerializer().serializeToString(copy).replace(/var\((--[\w-]+)\)/g, (_, name) => color(name));
  }

  const quote = (text) => (/[",\n]/.test(text) ? `"${String(text).replace(/"/g, '""')}"` : String(text));

  function toCsv(spec) {
    if (spec.cells) {
      const { table, rows } = spec.cells;
      const lines = rows.map((i) => [quote(table.names[i]), ...table.z[i].map((z) => (z === null ? "" : (10 ** (z / 10)).toPrecision(3)))].join());
      return `parameter,${table.x.join()}\n${lines.join("\n")}\n`;
    }
    const own = spec.lines.filter((one) => !one.isExtra && one.points);
    const table = new Map();
    own.forEach((one, n) => one.points.x.forEach((step, i) => {
      if (!table.has(step)) table.set(step, new Array(own.length).fill(""));
      table.get(step)[n] = one.points.y[i];
    }));
    const rows = [...table.keys()].sort((a, b) => a - b).map((step) => [step, ...table.get(step)].join());
    return `step,${own.map((one) => quote(one.name)).join()}\n${rows.join("\n")}\n`;
  }

  /* --- incidents --- */

  function openIncident(figure, step) {
    const all = [...document.querySelectorAll(`article[data-run="${figure.dataset.run}"] details.incident`)];
    const far = (one) => Math.min(...one.dataset.steps.split(" ").concat(one.dataset.step).map((at) => Math.abs(at - step)));
    const nearest = all.reduce((best, one) => (best && far(best) <= far(one) ? best : one), null);
    if (nearest) reveal(nearest);
  }

  function reveal(incident) {
    for (let above = incident; above; above = above.parentElement && above.parentElement.closest("details")) above.open = true;
    incident.querySelector("summary").focus({ preventScroll: true });
    incident.scrollIntoView({ block: "start" }); // the style sheet keeps it clear of the bar
  }

  function stepIncident(by) {
    const all = [...document.querySelectorAll("details.incident")];
    const now = all.indexOf(document.activeElement.closest && document.activeElement.closest("details.incident"));
    const next = all[now < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, now + by))];
    if (next) reveal(next);
  }

  /* --- options, theme, paper --- */

  function set(name, value) {
    options[name] = name === "smooth" ? Number(value) : value;
    if (name === "across") { for (const group of Object.keys(zooms)) delete zooms[group]; known = new WeakMap(); pictures = new WeakMap(); }
    for (const one of document.querySelectorAll(`[data-set="${name}"]`)) one.setAttribute("aria-pressed", String(one.dataset.value === value));
    drawEverything();
  }

  function turnLoss() { // away from what is shown, which was chosen by the numbers until now
    const shown = document.querySelector('figure[data-chart$="loss"]:not([hidden]) .plot');
    set("scale", shown && shown.state && shown.state.spec.log ? "linear" : "log");
  }

  function turnTheme() {
    const root = document.documentElement;
    const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    drawEverything();
  }

  /* Paper is light, narrow, and cannot be clicked. */
  function beginPrint() {
    if (printing.on) return;
    const root = document.documentElement;
    const closed = [...document.querySelectorAll("details:not([open])")];
    Object.assign(printing, { on: true, theme: root.dataset.theme || "", closed });
    root.dataset.theme = "light";
    // All drawn before this returns: the browser lays out the paper right after the event
    printing.closed.forEach((one) => { one.open = true; });
    document.querySelectorAll(".plot").forEach((plot) => { plot.style.width = "680px"; });
    drawEverything();
  }

  function endPrint() {
    if (!printing.on) return;
    const root = document.documentElement;
    printing.on = false;
    printing.closed.forEach((one) => { one.open = false; });
    if (printing.theme) root.dataset.theme = printing.theme; else delete root.dataset.theme;
    document.querySelectorAll(".plot").forEach((plot) => { plot.style.width = ""; });
    drawEverything();
  }

  /* --- tables: a click on a header sorts, a search box leaves out rows; a live page replaces the table under both --- */

  const sorts = {};

  function readyTables() {
    for (const table of document.querySelectorAll("table[data-sortable]")) {
      const heads = [...table.tHead.rows[0].cells];
      if (!table.dataset.ready) {
        table.dataset.ready = "1";
        heads.forEach((head, i) => {
          const button = document.createElement("button");
          button.type = "button"; button.className = "sort"; button.textContent = head.textContent;
          if (!head.textContent) return;
          button.addEventListener("click", () => {
            const now = sorts[table.className];
            sorts[table.className] = { column: i, up: now && now.column === i ? !now.up : true };
            readyTables();
          });
          head.replaceChildren(button);
        });
      }
      const sort = sorts[table.className];
      if (sort) sortRows(table, heads, sort);
    }
    filterRows();
    paintSwatches();
    tellTimes();
  }

  function sortRows(table, heads, { column, up }) {
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : up ? "ascending" : "descending"));
    const read = (row) => {
      const cell = row.cells[column], text = (cell.querySelector("[data-value]") || cell).textContent.trim();
      const number = parseFloat(text.replace(/,/g, ""));
      return { text, number: cell.querySelector("[data-value]") ? Number(cell.querySelector("[data-value]").dataset.value) : number };
    };
    const rows = [...table.tBodies[0].rows].map((row) => [row, read(row)]);
    const rank = ([, a], [, b]) => (Number.isNaN(a.number) || Number.isNaN(b.number)
      ? Number.isNaN(a.number) - Number.isNaN(b.number) || a.text.localeCompare(b.text, "en", { numeric: true }) : a.number - b.number);
    rows.sort((a, b) => (up ? rank(a, b) : rank(b, a)));
    table.tBodies[0].append(...rows.map(([row]) => row));
  }

  function filterRows() {
    const find = document.querySelector("input[data-find]");
    if (!find) return;
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const table of document.querySelectorAll("table[data-sortable]")) {
      for (const row of table.tBodies[0].rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    }
  }

  function tellTimes() {
    for (const one of document.querySelectorAll("time[datetime]")) {
      // The first text is kept, because the lines below replace it and this runs every ten seconds
      one.dataset.text = one.dataset.text || one.textContent;
      const seconds = Math.max(0, (Date.now() - Date.parse(one.dateTime)) / 1000);
      const ago = seconds < 100 ? `${Math.round(seconds)} s` : seconds < 6000 ? `${Math.round(seconds / 60)} min` : seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
      one.title = one.dataset.text;
      one.textContent = one.closest("td") ? `${ago} ago` : `${one.dataset.text} (${ago} ago)`; // a table has little room
    }
  }

  /* --- the page --- */

  function begin() {
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (event.key === "t") turnTheme();
      else if (event.key === "n") stepIncident(1);
      else if (event.key === "p") stepIncident(-1);
      else if (event.key === "l") turnLoss();
    });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("button, a");
      if (!button) return;
      const figure = button.closest("figure.chart");
      if (button.dataset.set) set(button.dataset.set, button.dataset.value);
      else if (figure && button.dataset.move) move(figure, button.dataset.move);
      else if (figure && button.dataset.save) save(figure, button.dataset.save);
      else if (button.hash) {
        const target = document.getElementById(button.hash.slice(1));
        if (target && target.matches("details.incident")) { event.preventDefault(); reveal(target); }
      }
    });
    document.addEventListener("change", (event) => {
      const { show } = event.target.dataset;
      if (show) { if (event.target.checked) hidden.delete(show); else hidden.add(show); drawEverything(); }
      else if (event.target.matches("select.order")) draw(event.target.closest("figure"));
    });
    document.addEventListener("input", (event) => {
      if (event.target.matches("[data-find]")) filterRows();
      else if (event.target.matches("figure .find")) draw(event.target.closest("figure"));
    });
    document.getElementById("theme").addEventListener("click", turnTheme);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawEverything);
    addEventListener("beforeprint", beginPrint);
    addEventListener("afterprint", endPrint);
    addEventListener("scroll", drawDirty, { passive: true });
    addEventListener("resize", drawSoon);
    setInterval(tellTimes, 10000);
    const data = document.getElementById("data");
    if (data) show(JSON.parse(data.textContent).runs);
    readyTables();
  }

  function show(found) {
    runs = { ...runs, ...found };
    drawEverything();
  }

  document.addEventListener("DOMContentLoaded", begin);
  return { show, readyTables };
})();

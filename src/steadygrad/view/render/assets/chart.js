"use strict";
/* One chart -> SVG: axes, lines, marks, a map of cells. Colours are variables of the style sheet, so that a change of
   theme needs no drawing. It knows nothing of runs or pages. */
const Chart = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const ROW = 15;      // height of a row of marks
  const FOOT = 30, TOP = 8, RIGHT = 14;
  const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
  const SYMBOLS = { // in a box from -5 to 5
    cross: "M-4,-4L4,4M4,-4L-4,4", bar: "M0,-5L0,5", diamond: "M0,-5L5,0L0,5L-5,0Z", tall: "M0,-6L3,0L0,6L-3,0Z",
    down: "M-5,-4L5,-4L0,5Z", up: "M-5,4L5,4L0,-5Z", left: "M4,-5L4,5L-5,0Z", square: "M-4,-4L4,-4L4,4L-4,4Z",
    dash: "M-5,-1.5L5,-1.5L5,1.5L-5,1.5Z", circle: "M-4,0A4,4,0,1,0,4,0A4,4,0,1,0,-4,0Z", peak: "M-5,4L-1,4L0,-5L1,4L5,4",
  };
  const OPEN = ["cross", "bar", "peak"]; // drawn as lines

  function make(tag, attributes, parent) {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    if (parent) parent.append(element);
    return element;
  }

  function write(parent, text, attributes) {
    make("text", attributes, parent).textContent = text;
  }

  /* --- numbers --- */

  function spell(value, digits) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(digits === undefined ? 2 : digits).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(digits === undefined ? 5 : digits + 1)));
  }

  const spellStep = (value) => Math.round(value).toLocaleString("en-US");
  function spellTime(seconds) {
    if (seconds < 120) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
    if (seconds < 7200) return `${Number((seconds / 60).toFixed(1))} min`;
    return `${Number((seconds / 3600).toFixed(2))} h`;
  }
  const raise = (power) => String(power).replace(/./g, (sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]);

  /* Round numbers between two, about `count` of them: 1, 2 or 5 times a power of ten, for time in units of a clock. */
  function listTicks(from, to, count, { whole = false, isTime = false } = {}) {
    const rough = (to - from) / Math.max(1, count);
    if (!(rough > 0)) return [from];
    let gap;
    if (isTime && rough > 30) {
      gap = [60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400].find((one) => one >= rough) || Math.ceil(rough / 86400) * 86400;
    } else {
      const power = 10 ** Math.floor(Math.log10(rough));
      gap = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
    }
    if (whole) gap = Math.max(1, gap);
    const ticks = [];
    // Multiplied, not added up: rounding errors would grow along the axis
    for (let i = Math.ceil(from / gap - 1e-9); i * gap <= to + gap * 1e-9; i++) ticks.push(Number((i * gap).toPrecision(12)));
    return ticks;
  }

  function listLogTicks(low, high, count) { // of powers; within two of them, round numbers between
    const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9);
    if (last - first >= 1) {
      const every = Math.max(1, Math.ceil((last - first + 1) / count));
      const ticks = [];
      for (let power = first; power <= last; power += every) ticks.push({ at: power, text: Math.abs(power) < 4 ? spell(10 ** power) : `10${raise(power)}` });
      return ticks;
    }
    return listTicks(10 ** low, 10 ** high, count).filter((value) => value > 0).map((value) => ({ at: Math.log10(value), text: spell(value) }));
  }

  /* --- a chart --- */

  /* spec: { height, left, log, isTime, range: [from, to], lines: [{ name, series, paint, dash, kind, width, faint }],
     marks: [{ name, symbol, paint, through, x, counts }], percent, zero, cells } */
  function draw(plot, spec) {
    const width = Math.max(220, plot.clientWidth || 600);
    const rows = spec.marks || [];
    const bottom = spec.height - FOOT - rows.length * ROW - (rows.length ? 4 : 0);
    const frame = { left: spec.left || 56, right: width - RIGHT, top: TOP, bottom };
    const [from, to] = spec.range;
    const x = (value) => frame.left + ((value - from) / (to - from || 1)) * (frame.right - frame.left);
    const svg = make("svg", { viewBox: `0 0 ${width} ${spec.height}`, width, height: spec.height, "aria-hidden": "true" });
    // url(#id) is looked up in the whole document: two charts must not share one
    const id = `clip-${Math.random().toString(36).slice(2)}`;
    const clip = make("clipPath", { id }, make("defs", {}, svg));
    make("rect", { x: frame.left, y: 0, width: frame.right - frame.left, height: spec.height }, clip);
    const state = { width, frame, x, from, to, svg, spec };
    drawSteps(state, rows.length); // before the lines, which cross its grid
    if (spec.cells) drawCells(state, id); else drawLines(state, id);
    drawMarks(state, rows, id);
    state.cursor = make("line", { class: "cursor", y1: frame.top, y2: spec.height - FOOT, visibility: "hidden" }, svg);
    state.select = make("rect", { class: "select", y: frame.top, height: spec.height - FOOT - frame.top, visibility: "hidden" }, svg);
    const old = plot.querySelector("svg");
    if (old) old.replaceWith(svg); else plot.prepend(svg);
    plot.state = state;
    return state;
  }

  function drawSteps({ svg, frame, from, to, x, spec, width }, numRows) {
    const foot = spec.height - FOOT;
    const count = Math.max(2, Math.floor((frame.right - frame.left) / (width < 500 ? 70 : 105)));
    for (const tick of listTicks(from, to, count, { whole: !spec.isTime, isTime: spec.isTime })) {
      if (tick < from || tick > to) continue;
      if (!spec.cells) make("line", { class: "grid", x1: x(tick), x2: x(tick), y1: frame.top, y2: foot }, svg);
      const anchor = x(tick) > frame.right - 24 ? "end" : "middle";
      write(svg, spec.isTime ? spellTime(tick) : spellStep(tick), { class: "tick", x: x(tick), y: foot + 15, "text-anchor": anchor });
    }
    make("line", { class: "axis", x1: frame.left, x2: frame.right, y1: foot, y2: foot }, svg);
    if (numRows) make("line", { class: "grid", x1: frame.left, x2: frame.right, y1: frame.bottom + 2, y2: frame.bottom + 2 }, svg);
    write(svg, spec.isTime ? "time" : "step", { class: "tick", x: frame.right, y: foot + 27, "text-anchor": "end" });
  }

  function drawLines(state, clipId) {
    const { svg, frame, from, to, spec } = state;
    const columns = Math.max(50, (frame.right - frame.left) / 2);
    const picked = spec.lines.map((line) => Series.pick(line.series, from, to, columns));
    let low = Infinity, high = -Infinity;
    spec.lines.forEach((line, n) => {
      for (const i of picked[n]) {
        const value = line.series.y[i];
        if (spec.log && value <= 0) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    });
    if (low > high) { low = spec.log ? 1 : 0; high = 1; }
    if (spec.log) { low = Math.log10(low); high = Math.log10(high); }
    if (spec.zero) low = Math.min(0, low);
    const pad = (high - low) * 0.05 || (spec.percent ? 0.5 : Math.abs(high) * 0.05) || 0.5;
    const bottom = spec.zero ? Math.min(0, low) : low - pad, top = high + pad;
    const place = (value) => frame.bottom - ((value - bottom) / (top - bottom)) * (frame.bottom - frame.top);
    const y = (value) => place(spec.log ? Math.log10(value) : value);
    Object.assign(state, { y, low: bottom, high: top });
    const count = Math.max(2, Math.floor((frame.bottom - frame.top) / 42));
    const ticks = spec.log ? listLogTicks(bottom, top, count)
      : listTicks(bottom, top, count).map((at) => ({ at, text: spec.percent ? `${Number((100 * at).toFixed(2))} %` : spell(at) }));
    for (const tick of ticks) {
      make("line", { class: "grid", x1: frame.left, x2: frame.right, y1: place(tick.at), y2: place(tick.at) }, svg);
      write(svg, tick.text, { class: "tick", x: frame.left - 7, y: place(tick.at) + 4, "text-anchor": "end" });
    }
    const group = make("g", { "clip-path": `url(#${clipId})` }, svg);
    spec.lines.forEach((line, n) => drawLine(group, state, line, picked[n]));
  }

  function drawLine(group, { x, y, frame, spec }, line, picked) {
    const shown = spec.log ? picked.filter((i) => line.series.y[i] > 0) : picked;
    if (!shown.length) return;
    const at = (i) => `${x(line.series.x[i]).toFixed(1)},${y(line.series.y[i]).toFixed(1)}`;
    const paint = `var(${line.paint})`;
    const style = `stroke:${paint};fill:none;stroke-width:${line.width || 1.5}${line.faint ? ";opacity:.28" : ""}`;
    if (line.kind === "area") {
      const ends = [shown[0], shown[shown.length - 1]].map((i) => x(line.series.x[i]).toFixed(1));
      make("path", { style: `fill:${paint};opacity:.16`, d: `M${ends[0]},${frame.bottom}L${shown.map(at).join("L")}L${ends[1]},${frame.bottom}Z` }, group);
    }
    if (line.kind === "dots" || line.kind === "points" || shown.length === 1) {
      const r = line.kind === "dots" ? 1.6 : 3;
      const dots = shown.map((i) => `M${x(line.series.x[i]).toFixed(1)},${y(line.series.y[i]).toFixed(1)}h0`).join("");
      make("path", { d: dots, style: `stroke:${paint};stroke-width:${2 * r};stroke-linecap:round;fill:none` }, group);
      if (line.kind === "dots") return;
    }
    const path = line.kind === "steps"
      ? `M${at(shown[0])}${shown.slice(1).map((i) => `H${x(line.series.x[i]).toFixed(1)}V${y(line.series.y[i]).toFixed(1)}`).join("")}`
      : `M${shown.map(at).join("L")}`;
    make("path", { class: "line", d: path, style, "stroke-dasharray": line.dash || "", "data-name": line.name }, group);
  }

  function drawMarks({ svg, frame, x, from, to, spec }, rows, clipId) {
    const group = make("g", { "clip-path": `url(#${clipId})` }, svg);
    for (const mark of (spec.through || rows).filter((one) => one.through)) {
      for (const step of mark.x.filter((one) => one >= from && one <= to).slice(0, 80)) {
        make("line", { class: "through", x1: x(step), x2: x(step), y1: frame.top, y2: spec.height - FOOT, style: `stroke:var(${mark.paint})` }, group);
      }
    }
    rows.forEach((mark, row) => {
      const level = frame.bottom + 6 + ROW * (row + 0.5);
      mark.x.forEach((step, i) => {
        if (step < from || step > to) return;
        const point = make("g", { class: "mark", transform: `translate(${x(step).toFixed(1)},${level})`, "data-step": mark.steps[i], "data-kind": mark.kind }, group);
        make("rect", { x: -6, y: -7, width: 12, height: 14, style: "fill:transparent;stroke:none" }, point); // to be hit by a finger
        make("path", {
          d: SYMBOLS[mark.symbol] || SYMBOLS.circle,
          style: `stroke:var(${mark.paint});fill:${OPEN.includes(mark.symbol) ? "none" : `var(${mark.paint})`}`,
        }, point);
        make("title", {}, point).textContent = `step ${spellStep(mark.steps[i])}: ${mark.name}${mark.counts[i] > 1 ? `, ${mark.counts[i]}×` : ""}`;
      });
    });
  }

  /* --- a map of cells: a picture, stretched; a dot in it says that a value was NaN or Inf --- */

  function drawCells(state, clipId) {
    const { svg, frame, x, spec } = state;
    const { picture, steps, labels, edges } = spec.cells;
    const height = frame.bottom - frame.top, row = height / labels.length;
    const group = make("g", { "clip-path": `url(#${clipId})` }, svg);
    make("image", {
      href: picture, x: x(edges[0]), y: frame.top, width: Math.max(1, x(edges[1]) - x(edges[0])), height,
      preserveAspectRatio: "none", style: "image-rendering:pixelated",
    }, group);
    const every = Math.max(1, Math.ceil(11 / row));
    const room = Math.floor((frame.left - 10) / 6.1);
    labels.forEach((label, i) => {
      if (i % every) return;
      const short = label.length > room ? `${label.slice(0, Math.ceil(room / 3))}…${label.slice(label.length - Math.floor((2 * room) / 3) + 1)}` : label;
      write(svg, short, { class: "tick name", x: frame.left - 6, y: frame.top + row * (i + 0.5) + 4, "text-anchor": "end" });
    });
    Object.assign(state, { row, steps });
  }

  return { draw, spell, spellStep, spellTime, raise, SYMBOLS, OPEN, DASHES, ROW };
})();

"use strict";
/* Numbers (the JSON beside this script, or what the live page is sent) -> charts. Words are HTML already; names go into
   charts through plain(), since the charting library reads a little HTML in its labels. */
const steadygrad = (() => {
  const MARKS = {
    nonfinite: ["x-thin", "--red"], skip: ["line-ns", "--orange"], sanitize: ["diamond", "--teal"],
    scale_lr: ["triangle-down", "--blue"], scale_weight_decay: ["triangle-up", "--teal"],
    rollback: ["triangle-left", "--purple"], halt: ["square", "--red"],
  };
  const THROUGH = ["scale_lr", "scale_weight_decay", "rollback", "halt"]; // few, and everything after them is different
  const ROUND = ["--blue", "--orange", "--teal", "--purple", "--red", "--green", "--amber"];
  const CONFIG = {
    displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  let runs = {};
  let logLoss = null;   // what the l key asked for
  let linking = false;  // a zoom is being handed on
  const printing = { on: false };

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (name) => plain(name.length > 34 ? name.slice(0, 12) + "…" + name.slice(-21) : name);
  const has = (points) => points && points.x.length > 0;
  const spread = (values) => {
    const positive = values.filter((v) => v > 0);
    return positive.length < values.length ? 1 : Math.max(...positive) / Math.min(...positive);
  };

  function layout(height, more) {
    const axis = { gridcolor: color("--grid"), linecolor: color("--line"), zerolinecolor: color("--grid"), tickcolor: color("--line") };
    const { xaxis, yaxis, lastStep, ...rest } = more || {};
    const pad = Math.max(0.5, 0.01 * (lastStep || 0));
    const range = lastStep === undefined ? undefined : [-pad, lastStep + pad];
    return {
      height, margin: { l: 58, r: 14, t: 8, b: 34 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--ink"), size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
      hovermode: "closest", showlegend: false, uirevision: "keep", dragmode: "zoom",
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--blue") },
      xaxis: { ...axis, title: { text: "step", standoff: 4, font: { color: color("--soft"), size: 11 } }, range, ...xaxis },
      yaxis: { ...axis, ...yaxis },
      ...rest,
    };
  }

  const line = (points, name, paint, more) => ({
    type: "scatter", mode: points.x.length === 1 ? "markers" : "lines", x: points.x, y: points.y, name: plain(name),
    line: { color: color(paint), width: 1.4 }, marker: { color: color(paint) },
    hovertemplate: "step %{x:,}<br>" + plain(name) + " %{y:.5~g}<extra></extra>", ...more,
  });

  const lines = (marks) => marks.filter((m) => THROUGH.includes(m.kind)).flatMap((m) => m.x.slice(0, 60).map((x) => ({
    type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "below",
    line: { color: color(MARKS[m.kind][1]), width: 1, dash: "dot" },
  })));

  function drawLoss(run) {
    const loss = run.curves.loss;
    if (!has(loss) && run.marks.length === 0) return null;
    const rows = run.marks.map((m) => m.name);
    const share = rows.length ? Math.min(0.5, 0.07 * rows.length + 0.02) : 0;
    const log = logLoss === null ? has(loss) && spread(loss.y) > 100 : logLoss;
    const traces = has(loss) ? [line(loss, "loss", "--blue")] : [];
    for (const mark of run.marks) {
      const [symbol, paint] = MARKS[mark.kind] || ["circle", "--soft"];
      traces.push({
        type: "scatter", mode: "markers", x: mark.x, y: mark.x.map(() => rows.indexOf(mark.name)), yaxis: "y2",
        name: plain(mark.name), customdata: mark.counts,
        marker: { symbol, size: 9, color: color(paint), line: { color: color(paint), width: 2 } },
        hovertemplate: "step %{x:,}<br>" + plain(mark.name) + ", %{customdata}×<extra></extra>",
      });
    }
    const more = {
      yaxis: { domain: [share ? share + 0.04 : 0, 1], type: log ? "log" : "linear" }, shapes: lines(run.marks), lastStep: run.last_step,
      xaxis: rows.length ? { anchor: "y2" } : {}, margin: { l: rows.length ? 138 : 58, r: 14, t: 8, b: 34 },
    };
    if (rows.length) more.yaxis2 = {
      domain: [0, share], range: [-0.6, rows.length - 0.4], tickvals: rows.map((_, i) => i), ticktext: rows.map(plain),
      fixedrange: true, gridcolor: color("--grid"), zeroline: false, tickfont: { size: 11, color: color("--soft") },
    };
    return [traces, layout(320 + 26 * rows.length, more)];
  }

  function drawNorm(run) {
    const norm = run.curves.grad_norm;
    if (!has(norm)) return null;
    const traces = [line(norm, "norm", "--blue")];
    const shapes = lines(run.marks);
    if (has(run.curves.applied_norm)) traces.push(line(run.curves.applied_norm, "after clipping", "--orange", { mode: "markers", marker: { size: 3, color: color("--orange") } }));
    if (run.threshold) traces.push(line({ x: [norm.x[0], norm.x[norm.x.length - 1]], y: [run.threshold, run.threshold] }, "clip threshold", "--red", { line: { color: color("--red"), width: 1.2, dash: "dash" } }));
    return [traces, layout(290, { yaxis: { type: "log", exponentformat: "power", dtick: spread(norm.y) > 100 ? 1 : undefined }, shapes, lastStep: run.last_step, showlegend: traces.length > 1, margin: { l: run.marks.length ? 138 : 58, r: 14, t: 28, b: 34 } })];
  }

  const drawOne = (points, name, paint, more) => (has(points) ? [[line(points, name, paint, { line: { color: color(paint), width: 1.4, shape: "hv" } })], layout(230, more)] : null);

  function drawShare(run) {
    const { clipped, skipped } = run.shares;
    if (!has(clipped)) return null;
    const fill = { fill: "tozeroy", mode: "lines", hovertemplate: "around step %{x:,}<br>%{y:.2~%}<extra>%{fullData.name}</extra>" };
    const one = clipped.x.length === 1 ? { mode: "markers" } : {};
    const traces = [line(clipped, "clipped", "--blue", { ...fill, ...one }), line(skipped, "skipped", "--orange", { ...fill, ...one })];
    return [traces, layout(230, { yaxis: { tickformat: ".0%", rangemode: "tozero", range: Math.max(...clipped.y, ...skipped.y) > 0 ? undefined : [0, 1] }, lastStep: run.last_step, showlegend: true, margin: { l: 58, r: 14, t: 28, b: 34 } })];
  }

  const middle = (cells) => {
    const known = cells.flat().filter((z) => z !== null).sort((a, b) => a - b);
    return known.length ? known[Math.floor(known.length / 2)] : 0;
  };

  function drawCells(table, what, centre, lastStep) {
    if (!table) return null;
    const mid = centre === null ? middle(table.z) : centre;
    const labels = table.names.map(short);
    const traces = [{
      type: "heatmap", x: table.x, y: labels.map((_, i) => i), z: table.z, zmid: mid, zmin: mid - 4, zmax: mid + 4,
      colorscale: [[0, color("--heat-low")], [0.5, color("--heat-mid")], [1, color("--heat-high")]], hoverongaps: false,
      colorbar: { thickness: 10, outlinewidth: 0, tickprefix: "10<sup>", ticksuffix: "</sup>", len: 1 },
      text: table.z.map((row, i) => row.map(() => short(table.names[i]))),
      hovertemplate: "step %{x:,}<br>%{text}<br>" + what + " 10<sup>%{z:.2f}</sup><extra></extra>",
    }];
    if (table.bad.length) traces.push({
      type: "scatter", mode: "markers", x: table.bad.map((b) => table.x[b[0]]), y: table.bad.map((b) => b[1]),
      marker: { symbol: "square", size: Math.max(4, Math.min(9, 900 / table.x.length)), color: color("--purple") },
      text: table.bad.map((b) => short(table.names[b[1]])), name: "not finite",
      hovertemplate: "step %{x:,}<br>%{text}<br>NaN or Inf<extra></extra>",
    });
    const every = Math.ceil(labels.length / 40);
    const ticks = labels.map((_, i) => i).filter((i) => i % every === 0);
    return [traces, layout(Math.max(170, Math.min(760, 70 + 17 * labels.length)), {
      yaxis: { tickvals: ticks, ticktext: ticks.map((i) => labels[i]), tickfont: { size: 10 }, range: [-0.5, labels.length - 0.5], showgrid: false, automargin: true },
      xaxis: { showgrid: false }, lastStep: Math.max(lastStep, table.x[table.x.length - 1]),
    })];
  }

  function drawAll(curve, log) {
    const traces = Object.values(runs).filter((run) => has(run.curves[curve])).map((run, i) => line(run.curves[curve], run.name, ROUND[i % ROUND.length]));
    const spreads = traces.map((t) => spread(t.y));
    if (!traces.length) return null;
    return [traces, layout(320, { showlegend: true, lastStep: Math.max(...Object.values(runs).map((run) => run.last_step)), yaxis: { type: log || Math.max(...spreads) > 100 ? "log" : "linear" }, margin: { l: 58, r: 14, t: 32, b: 34 } })];
  }

  const DRAW = {
    loss: drawLoss, norm: drawNorm, share: drawShare,
    rate: (run) => drawOne(run.curves.learning_rate, "learning rate", "--teal", { lastStep: run.last_step, yaxis: { exponentformat: "power", rangemode: "tozero" } }),
    scale: (run) => drawOne(run.curves.loss_scale, "loss scale", "--purple", { lastStep: run.last_step, yaxis: { type: "log", exponentformat: "power" } }),
    layers: (run) => drawCells(run.norms, "norm", null, run.last_step),
    ratios: (run) => drawCells(run.ratios, "ratio", -3, run.last_step),
    compare_loss: () => drawAll("loss", logLoss === true), compare_norm: () => drawAll("grad_norm", true),
  };

  function draw(figure) {
    const run = runs[figure.dataset.run] || {};
    const drawn = figure.dataset.run && !run.curves ? null : DRAW[figure.dataset.chart](run);
    figure.hidden = drawn === null;
    if (drawn === null) return;
    const plot = figure.querySelector(".plot");
    const isNew = !plot.classList.contains("js-plotly-plot");
    plot.dataset.whole = drawn[1].xaxis.range.join();
    Plotly.react(plot, drawn[0], drawn[1], CONFIG);
    if (isNew) listen(plot, figure);
  }

  function listen(plot, figure) {
    plot.on("plotly_relayout", (change) => {
      if (linking || figure.dataset.run === undefined) return;
      const whole = change["xaxis.autorange"], from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
      if (!whole && from === undefined) return;
      linking = true;
      const others = [...document.querySelectorAll(`figure.chart[data-run="${figure.dataset.run}"] .js-plotly-plot`)].filter((p) => p !== plot);
      Promise.all(others.map((p) => Plotly.relayout(p, whole ? { "xaxis.autorange": true } : { "xaxis.range": [from, to] }))).finally(() => { linking = false; });
    });
    plot.on("plotly_click", (event) => {
      const point = event.points[0];
      if (point.yaxis && point.yaxis._id === "y2") openIncident(plot.closest("[data-run]"), point.x);
    });
    plot.addEventListener("keydown", (event) => moveByKey(plot, event));
  }

  function moveByKey(plot, event) {
    const [from, to] = plot.layout.xaxis.range.map(Number), size = to - from;
    const moves = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-0.3, 0.3] };
    const whole = plot.dataset.whole.split(",").map(Number);
    if (event.key === "0") Plotly.relayout(plot, { "xaxis.range[0]": whole[0], "xaxis.range[1]": whole[1] });
    else if (moves[event.key]) Plotly.relayout(plot, { "xaxis.range[0]": from + moves[event.key][0] * size, "xaxis.range[1]": to + moves[event.key][1] * size });
    else return;
    event.preventDefault();
  }

  function openIncident(inside, step) {
    const all = [...(document.querySelector(`article[data-run="${inside.dataset.run}"]`) || document).querySelectorAll("details.incident")];
    const nearest = all.reduce((best, one) => (best === null || Math.abs(one.dataset.step - step) < Math.abs(best.dataset.step - step) ? one : best), null);
    if (nearest) reveal(nearest);
  }

  function reveal(incident) {
    incident.open = true;
    incident.querySelector("summary").focus({ preventScroll: true });
    incident.scrollIntoView({ block: "center" });
  }

  function stepIncident(by) {
    const all = [...document.querySelectorAll("details.incident")];
    const now = all.indexOf(document.activeElement.closest && document.activeElement.closest("details.incident"));
    const next = all[now < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, now + by))];
    if (next) reveal(next);
  }

  const drawEverything = () => document.querySelectorAll("figure.chart").forEach(draw);

  function turnTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    drawEverything();
  }

  function beginPrint() {
    if (printing.on) return;
    Object.assign(printing, { on: true, theme: document.documentElement.dataset.theme || "", closed: [...document.querySelectorAll("details:not([open])")] });
    document.documentElement.dataset.theme = "light";
    printing.closed.forEach((one) => { one.open = true; });
    document.querySelectorAll(".js-plotly-plot").forEach((plot) => { plot.style.width = "680px"; });
    drawEverything();
    document.querySelectorAll(".js-plotly-plot").forEach((plot) => Plotly.relayout(plot, { width: 680, autosize: false }));
  }

  function endPrint() {
    if (!printing.on) return;
    printing.on = false;
    printing.closed.forEach((one) => { one.open = false; });
    if (printing.theme) document.documentElement.dataset.theme = printing.theme; else delete document.documentElement.dataset.theme;
    document.querySelectorAll(".js-plotly-plot").forEach((plot) => { plot.style.width = ""; });
    drawEverything();
  }

  function begin() {
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      if (event.key === "t") turnTheme();
      else if (event.key === "n") stepIncident(1);
      else if (event.key === "p") stepIncident(-1);
      else if (event.key === "l") { logLoss = !logLoss; drawEverything(); }
    });
    document.getElementById("theme").addEventListener("click", turnTheme);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawEverything);
    addEventListener("beforeprint", beginPrint);
    addEventListener("afterprint", endPrint);
    const data = document.getElementById("data");
    if (data) show(JSON.parse(data.textContent).runs);
  }

  function show(found) {
    runs = { ...runs, ...found };
    drawEverything();
  }

  document.addEventListener("DOMContentLoaded", begin);
  return { show };
})();

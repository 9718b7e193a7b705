"use strict";
/* Numbers (the JSON beside this script, or what the live page is sent) -> charts. Words are HTML already; names go into
   charts through plain(), since the charting library reads a little HTML in its labels. */
const steadygrad = (() => {
  const MARGIN = { l: 58, r: 14, t: 8, b: 34 };
  const MOVES = { // shares of the width, at its left and right end
    ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-0.3, 0.3],
  };
  const ROUND = ["--blue", "--orange", "--teal", "--purple", "--red", "--green", "--amber"];
  const CONFIG = {
    displaylogo: false, responsive: true, doubleClick: false, // we show the whole run ourselves
    // By name: the library's own choice has a button that uploads the chart.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d"]],
    showSendToCloud: false, plotlyServerURL: "", topojsonURL: "/",
  };
  let runs = {};
  let logLoss = null;   // what the l key asked for
  const zooms = {};     // group of charts that move together -> the steps it shows, when not all
  let revision = 0;     // of what the reader did by hand: a new one forgets it
  const printing = { on: false };

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (name) => plain(name.length > 34 ? name.slice(0, 12) + "…" + name.slice(-21) : name);
  const has = (points) => points && points.x.length > 0;
  const spread = (values) => {
    const positive = values.filter((v) => v > 0);
    return positive.length < values.length ? 1 : Math.max(...positive) / Math.min(...positive);
  };

  const isLogLoss = (losses) => (logLoss === null ? losses.some((loss) => spread(loss.y) > 100) : logLoss);

  function layout(height, more) {
    const [grid, border, soft] = [color("--grid"), color("--line"), color("--soft")];
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: border, tickcolor: border };
    const { xaxis, yaxis, lastStep, ...rest } = more || {};
    const pad = Math.max(0.5, 0.01 * (lastStep || 0));
    const range = lastStep === undefined ? undefined : [-pad, lastStep + pad];
    return {
      height, margin: MARGIN,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--ink"), size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
      hovermode: "closest", showlegend: false, uirevision: revision, dragmode: "zoom",
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--blue") },
      xaxis: { ...axis, title: { text: "step", standoff: 4, font: { color: soft, size: 11 } }, range, ...xaxis },
      yaxis: { ...axis, ...yaxis },
      ...rest,
    };
  }

  const line = (points, name, paint, more) => ({
    type: "scatter", mode: points.x.length === 1 ? "markers" : "lines", x: points.x, y: points.y, name: plain(name),
    line: { color: color(paint), width: 1.4 }, marker: { color: color(paint) },
    hovertemplate: "step %{x:,}<br>" + plain(name) + " %{y:.5~g}<extra></extra>", ...more,
  });

  const lines = (marks) => marks.filter((m) => m.through).flatMap((m) => m.x.slice(0, 60).map((x) => ({
    type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "below",
    line: { color: color(m.paint), width: 1, dash: "dot" },
  })));

  function drawLoss(run) {
    const loss = run.curves.loss;
    if (!has(loss) && run.marks.length === 0) return null;
    const rows = run.marks.map((m) => m.name);
    const share = rows.length ? Math.min(0.5, 0.07 * rows.length + 0.02) : 0;
    const log = has(loss) && isLogLoss([loss]);
    const traces = has(loss) ? [line(loss, "loss", "--blue")] : [];
    for (const mark of run.marks) {
      traces.push({
        type: "scatter", mode: "markers", x: mark.x, y: mark.x.map(() => rows.indexOf(mark.name)), yaxis: "y2",
        name: plain(mark.name), customdata: mark.counts,
        marker: { symbol: mark.symbol, size: 9, color: color(mark.paint), line: { color: color(mark.paint), width: 2 } },
        hovertemplate: "step %{x:,}<br>" + plain(mark.name) + ", %{customdata}×<extra></extra>",
      });
    }
    const more = {
      yaxis: { domain: [share ? share + 0.04 : 0, 1], type: log ? "log" : "linear" },
      shapes: lines(run.marks), lastStep: run.last_step,
      xaxis: rows.length ? { anchor: "y2" } : {}, margin: { ...MARGIN, l: rows.length ? 138 : 58 },
    };
    if (rows.length) more.yaxis2 = {
      domain: [0, share], range: [-0.6, rows.length - 0.4], fixedrange: true,
      tickvals: rows.map((_, i) => i), ticktext: rows.map(plain),
      gridcolor: color("--grid"), zeroline: false, tickfont: { size: 11, color: color("--soft") },
    };
    return [traces, layout(320 + 26 * rows.length, more)];
  }

  function drawNorm(run) {
    const norm = run.curves.grad_norm, after = run.curves.applied_norm;
    if (!has(norm)) return null;
    const traces = [line(norm, "norm", "--blue")];
    if (has(after)) {
      traces.push(line(after, "after clipping", "--orange", { mode: "markers", marker: { size: 3, color: color("--orange") } }));
    }
    if (run.threshold) {
      const ends = { x: [norm.x[0], norm.x[norm.x.length - 1]], y: [run.threshold, run.threshold] };
      const dashes = { color: color("--red"), width: 1.2, dash: "dash" };
      traces.push(line(ends, "clip threshold", "--red", { line: dashes }));
    }
    return [traces, layout(290, {
      yaxis: { type: "log", exponentformat: "power", dtick: spread(norm.y) > 100 ? 1 : undefined },
      shapes: lines(run.marks), lastStep: run.last_step, showlegend: traces.length > 1,
      margin: { ...MARGIN, l: run.marks.length ? 138 : 58, t: 28 },
    })];
  }

  function drawNamed(run, numbers, dots) {
    const names = Object.keys(numbers || {}).filter((name) => has(numbers[name]));
    if (!names.length) return null;
    const mark = (paint) => (dots ? { mode: "lines+markers", marker: { size: 5, color: color(paint) } } : {});
    const paints = names.map((_, i) => ROUND[i % ROUND.length]);
    const traces = names.map((name, i) => line(numbers[name], name, paints[i], mark(paints[i])));
    const low = Math.min(...traces.map((trace) => Math.min(...trace.y)));
    const high = Math.max(...traces.map((trace) => Math.max(...trace.y)));
    const yaxis = { type: low > 0 && high / low > 100 ? "log" : "linear", exponentformat: "power" };
    return [traces, layout(290, { showlegend: true, lastStep: run.last_step, yaxis, margin: { ...MARGIN, t: 40 } })];
  }

  function drawValidation(run) {
    const names = Object.keys(run.validation || {}).filter((name) => has(run.validation[name]));
    if (!names.length) return null;
    const trained = run.curves.loss;
    const soft = { line: { color: color("--soft"), width: 0.8 }, opacity: 0.6 };
    const traces = has(trained) ? [line(trained, "training loss", "--soft", soft)] : [];
    names.forEach((name, i) => {
      const paint = ["--orange", "--purple", "--teal", "--red"][i % 4];
      traces.push(line(run.validation[name], name, paint, {
        mode: "lines+markers", marker: { size: 5, color: color(paint) }, line: { color: color(paint), width: 2 },
      }));
    });
    const type = isLogLoss(traces) ? "log" : "linear";
    return [traces, layout(290, { showlegend: true, lastStep: run.last_step, yaxis: { type }, margin: { ...MARGIN, t: 40 } })];
  }

  function drawSteps(run, points, name, paint, yaxis) {
    if (!has(points)) return null;
    const steps = { color: color(paint), width: 1.4, shape: "hv" };
    const wide = spread(points.y) > 100; // one jump must not flatten the rest
    const scale = { type: wide ? "log" : "linear", dtick: wide ? 1 : undefined, exponentformat: "power" };
    const more = { lastStep: run.last_step, yaxis: { ...scale, automargin: true, ...yaxis } };
    return [[line(points, name, paint, { line: steps })], layout(230, more)];
  }

  function drawShare(run) {
    const { clipped, skipped } = run.shares;
    if (!has(clipped)) return null;
    const hovertemplate = "around step %{x:,}<br>%{y:.2~%}<extra>%{fullData.name}</extra>";
    const more = { fill: "tozeroy", mode: clipped.x.length === 1 ? "markers" : "lines", hovertemplate };
    const traces = [line(clipped, "clipped", "--blue", more), line(skipped, "skipped", "--orange", more)];
    const range = Math.max(...clipped.y, ...skipped.y) > 0 ? undefined : [0, 1];
    return [traces, layout(230, {
      yaxis: { tickformat: ".0%", rangemode: "tozero", range }, lastStep: run.last_step, showlegend: true,
      margin: { ...MARGIN, t: 28 },
    })];
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
    if (table.bad.length) {
      const bad = table.z.map((row) => row.map(() => null));
      table.bad.forEach(([column, row]) => { bad[row][column] = 1; });
      traces.push({
        type: "heatmap", x: table.x, y: traces[0].y, z: bad, text: traces[0].text, showscale: false, hoverongaps: false,
        colorscale: [[0, color("--purple")], [1, color("--purple")]], zmin: 0, zmax: 1,
        hovertemplate: "step %{x:,}<br>%{text}<br>NaN or Inf<extra></extra>",
      });
    }
    const every = Math.ceil(labels.length / 40);
    const ticks = labels.map((_, i) => i).filter((i) => i % every === 0);
    return [traces, layout(Math.max(170, Math.min(760, 70 + 17 * labels.length)), {
      yaxis: {
        tickvals: ticks, ticktext: ticks.map((i) => labels[i]), tickfont: { size: 10 },
        range: [-0.5, labels.length - 0.5], showgrid: false, automargin: true,
      },
      xaxis: { showgrid: false }, lastStep: Math.max(lastStep, table.x[table.x.length - 1]),
    })];
  }

  function drawAll(find, isLog) {
    const all = Object.values(runs).filter((run) => has(find(run)));
    if (!all.length) return null;
    const traces = all.map((run, i) => line(find(run), run.name, ROUND[i % ROUND.length]));
    const type = isLog(traces) ? "log" : "linear";
    const lastStep = Math.max(...all.map((run) => run.last_step));
    return [traces, layout(320, { showlegend: true, lastStep, yaxis: { type }, margin: { ...MARGIN, t: 32 } })];
  }

  const DRAW = {
    loss: drawLoss, validation: drawValidation, norm: drawNorm, share: drawShare,
    metrics: (run) => drawNamed(run, run.metrics, true), extra: (run) => drawNamed(run, run.extra, false),
    rate: (run) => drawSteps(run, run.curves.learning_rate, "learning rate", "--teal", { rangemode: "tozero" }),
    scale: (run) => drawSteps(run, run.curves.loss_scale, "loss scale", "--purple", { type: "log" }),
    layers: (run) => drawCells(run.norms, "norm", null, run.last_step),
    ratios: (run) => drawCells(run.ratios, "ratio", -3, run.last_step),
    compare_loss: () => drawAll((run) => run.curves.loss, isLogLoss),
    compare_validation: () => drawAll((run) => Object.values(run.validation || {})[0], isLogLoss),
    compare_norm: () => drawAll((run) => run.curves.grad_norm, () => true),
  };

  function draw(figure) {
    const run = runs[figure.dataset.run] || {};
    const drawn = figure.dataset.run && !run.curves ? null : DRAW[figure.dataset.chart](run);
    figure.hidden = drawn === null;
    if (drawn === null) return;
    const plot = figure.querySelector(".plot");
    const isNew = !plot.classList.contains("js-plotly-plot");
    const zoomed = zooms[groupOf(figure)];
    if (zoomed) drawn[1].xaxis.range = zoomed;
    Plotly.react(plot, drawn[0], drawn[1], CONFIG);
    if (isNew) listen(plot, figure);
  }

  const groupOf = (figure) => figure.dataset.run || figure.dataset.chart;

  /* A zoom is kept here, not in the chart: with new steps the chart forgets one that was not made by mouse. */
  function zoom(figure, range) {
    const group = groupOf(figure);
    if (range) zooms[group] = range; else { delete zooms[group]; revision += 1; }
    document.querySelectorAll("figure.chart").forEach((one) => { if (groupOf(one) === group) draw(one); });
  }

  function listen(plot, figure) {
    plot.on("plotly_relayout", (change) => {
      const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
      if (from !== undefined) zoom(figure, [Number(from), Number(to)]);
    });
    plot.on("plotly_doubleclick", () => zoom(figure, null));
    plot.on("plotly_click", (event) => {
      const point = event.points[0];
      if (point.yaxis && point.yaxis._id === "y2") openIncident(figure, point.x);
    });
    plot.addEventListener("keydown", (event) => moveByKey(plot, figure, event));
  }

  function moveByKey(plot, figure, event) {
    const [from, to] = plot.layout.xaxis.range.map(Number), size = to - from;
    const move = MOVES[event.key];
    if (!move && event.key !== "0") return;
    zoom(figure, move ? [from + move[0] * size, to + move[1] * size] : null);
    event.preventDefault();
  }

  function openIncident(figure, step) {
    const all = [...document.querySelectorAll(`article[data-run="${figure.dataset.run}"] details.incident`)];
    const far = (one) => Math.abs(one.dataset.step - step);
    const nearest = all.reduce((best, one) => (best && far(best) <= far(one) ? best : one), null);
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

  function turnLoss() { // away from what is shown, which was chosen by the numbers until now
    const shown = document.querySelector('figure[data-chart$="loss"] .js-plotly-plot');
    logLoss = logLoss === null ? !(shown && shown.layout.yaxis.type === "log") : !logLoss;
    drawEverything();
  }

  const drawEverything = () => document.querySelectorAll("figure.chart").forEach(draw);

  function turnTheme() {
    const root = document.documentElement;
    const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    drawEverything();
  }

  const plots = () => document.querySelectorAll(".js-plotly-plot");

  /* Paper is light, narrow, and cannot be clicked. */
  function beginPrint() {
    if (printing.on) return;
    const root = document.documentElement;
    const closed = [...document.querySelectorAll("details:not([open])")];
    Object.assign(printing, { on: true, theme: root.dataset.theme || "", closed });
    root.dataset.theme = "light";
    printing.closed.forEach((one) => { one.open = true; });
    plots().forEach((plot) => { plot.style.width = "680px"; });
    drawEverything();
    plots().forEach((plot) => Plotly.relayout(plot, { width: 680, autosize: false }));
  }

  function endPrint() {
    if (!printing.on) return;
    const root = document.documentElement;
    printing.on = false;
    printing.closed.forEach((one) => { one.open = false; });
    if (printing.theme) root.dataset.theme = printing.theme; else delete root.dataset.theme;
    plots().forEach((plot) => { plot.style.width = ""; });
    drawEverything();
  }

  function begin() {
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "t") turnTheme();
      else if (event.key === "n") stepIncident(1);
      else if (event.key === "p") stepIncident(-1);
      else if (event.key === "l") turnLoss();
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

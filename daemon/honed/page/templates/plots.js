// Draws the figures with uPlot, in the place of the drawings of the page: values under the pointer, zoom, a logarithmic
// scale, smoothing. All of it by keys, too.
"use strict";
(() => {
  const COLORS = ["--a", "--b", "--c", "--d", "--a", "--b", "--c", "--d"];
  const DASHES = [[], [6, 3], [2, 3], [], [10, 3, 2, 3], [], [], [7, 4]];
  const HEIGHT = 210, MIN_WIDTH = 120, MIN_SMOOTHED = 8;
  const state = {isLog: false, smooth: 0, ranges: new Map()};
  const drawn = new Map(); // figure → its plot
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tools = () => document.querySelector("#plot-tools");

  // An average with exponential weights, and the correction of its begin.
  const smoothed = (values, weight) => {
    let last = 0, total = 0;
    return values.map(value => {
      if (value === null) return null;
      last = last * weight + (1 - weight) * value;
      total = total * weight + (1 - weight);
      return last / total;
    });
  };
  const words = value => value == null ? "–" : String(Number(value.toPrecision(5)));

  const draw = figure => {
    const series = JSON.parse(figure.dataset.plot), title = figure.querySelector("figcaption b").textContent;
    const joined = uPlot.join(series.map(one => [one.x, one.y]));
    const isLog = state.isLog && series.every(one => one.y.every(value => value > 0));
    const data = [joined[0]], lines = [{label: "step", value: (_, step) => words(step)}];
    series.forEach((one, n) => {
      const soft = state.smooth && one.y.length >= MIN_SMOOTHED;
      const stroke = () => color(COLORS[n % COLORS.length]), dash = DASHES[n % DASHES.length];
      const line = {label: one.name, stroke, dash, width: 1.8, spanGaps: true, points: {show: one.y.length <= 40, size: 5},
        value: (_, value) => words(value)};
      if (soft) {
        data.push(joined[n + 1]);
        lines.push({...line, label: `${one.name}, raw`, alpha: 0.35, dash: [], width: 1, points: {show: false}});
      }
      data.push(soft ? smoothed(joined[n + 1], state.smooth) : joined[n + 1]);
      lines.push(soft ? {...line, points: {show: false}} : line);
    });
    const axis = {stroke: () => color("--dim"), grid: {stroke: () => color("--line"), width: 1},
      ticks: {stroke: () => color("--dim"), width: 1, size: 4}, font: "11px system-ui, sans-serif"};
    const range = state.ranges.get(title);
    const plot = new uPlot({
      width: Math.max(figure.clientWidth, MIN_WIDTH), height: HEIGHT,
      scales: {x: {time: false, ...(range && {min: range[0], max: range[1]})},
        y: isLog ? {distr: 3} : {range: (_, low, high) => uPlot.rangeNum("zero" in figure.dataset ? Math.min(0, low) : low,
          high, 0.08, true)}},
      axes: [{...axis, size: 30}, {...axis, size: 58, values: (_, ticks) => ticks.map(one => one == null ? "" : words(one))}],
      series: lines, legend: {live: true}, cursor: {sync: {key: "step", setSeries: false}, focus: {prox: -1}},
      hooks: {setScale: [(one, key) => {
        if (key !== "x") return;
        const {min, max} = one.scales.x, xs = one.data[0];
        if (min > xs[0] || max < xs[xs.length - 1]) state.ranges.set(title, [min, max]); else state.ranges.delete(title);
      }]},
    }, data, figure);
    if (range) plot.setScale("x", {min: range[0], max: range[1]});
    plot.root.tabIndex = 0;
    plot.root.setAttribute("role", "group");
    plot.root.setAttribute("aria-label", figure.querySelector("svg[role=img]").getAttribute("aria-label"));
    plot.root.querySelectorAll(".u-legend th").forEach(one => one.setAttribute("scope", "row"));
    plot.root.querySelectorAll("canvas").forEach(one => one.setAttribute("aria-hidden", "true"));
    plot.root.querySelector(".u-legend").setAttribute("aria-label", `${title}: values at the cursor`);
    plot.root.addEventListener("keydown", event => onKey(event, plot, title));
    figure.classList.add("drawn");
    drawn.set(figure, plot);
  };
  const zoom = (plot, factor) => {
    const {min, max} = plot.scales.x, xs = plot.data[0], at = plot.cursor.idx;
    const middle = at == null ? (min + max) / 2 : xs[at], half = (max - min) / 2 * factor;
    plot.setScale("x", {min: Math.max(xs[0], middle - half), max: Math.min(xs[xs.length - 1], middle + half)});
  };
  const whole = plot => { const xs = plot.data[0]; plot.setScale("x", {min: xs[0], max: xs[xs.length - 1]}); };
  const onKey = (event, plot, title) => {
    const xs = plot.data[0], moves = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10};
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in moves) {
      const from = plot.cursor.idx ?? (moves[event.key] > 0 ? -1 : xs.length);
      const at = Math.min(xs.length - 1, Math.max(0, from + moves[event.key]));
      plot.setCursor({left: plot.valToPos(xs[at], "x"), top: plot.bbox.height / 2 / devicePixelRatio});
      const said = plot.series.slice(1).map((one, n) => `${one.label} ${words(plot.data[n + 1][at])}`);
      const news = document.querySelector("#news");
      if (news) news.textContent = `step ${xs[at]}: ${said.join(", ")}`;
    } else if (event.key === "+" || event.key === "=") zoom(plot, 0.5);
    else if (event.key === "-") zoom(plot, 2);
    else if (event.key === "0") whole(plot);
    else return;
    event.preventDefault();
  };
  const redraw = () => {
    const focus = [...drawn].find(([, plot]) => plot.root === document.activeElement);
    for (const [figure, plot] of drawn) { plot.destroy(); drawn.delete(figure); }
    for (const figure of document.querySelectorAll("figure[data-plot]")) draw(figure);
    const again = focus && document.contains(focus[0]) && drawn.get(focus[0]);
    if (again) again.root.focus({preventScroll: true});
  };
  // New figures of a page that has been updated; those that stayed keep their plots.
  const update = () => {
    for (const [figure, plot] of drawn) if (!document.contains(figure)) { plot.destroy(); drawn.delete(figure); }
    for (const figure of document.querySelectorAll("figure[data-plot]")) if (!drawn.has(figure)) draw(figure);
    bind();
  };
  const bind = () => {
    const box = tools();
    if (!box || !box.hidden) return;
    const log = box.querySelector("#log"), smooth = box.querySelector("#smooth");
    box.hidden = false;
    smooth.value = state.smooth;
    log.setAttribute("aria-pressed", state.isLog);
    log.addEventListener("click", () => {
      state.isLog = !state.isLog;
      log.setAttribute("aria-pressed", state.isLog);
      redraw();
    });
    smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); redraw(); });
    box.querySelector("#whole").addEventListener("click", () => { for (const plot of drawn.values()) whole(plot); });
  };
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; redraw(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("refreshed", update);
  // What was folded had no width.
  document.addEventListener("toggle", event => { if (event.target.open && event.target.querySelector("figure[data-plot]")) redraw(); }, true);
  update();
})();

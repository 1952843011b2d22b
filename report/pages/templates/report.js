// Draws the plots: those in view at once, the others when the browser is idle, those behind a click when it is opened, and all that can be
// seen before the page is printed. To be called again where the page has been changed: plots that are drawn are brought up to date, as far as
// they differ.
window.crosstrainDraw = () => {
  "use strict";
  if (window.crosstrainOver) window.crosstrainOver.abort(); // what a call before this one listens to
  const over = window.crosstrainOver = new AbortController();
  const PRINT_WIDTH = 680; // a page of A4 or Letter without its margins, in pixels
  const SMALL_PRINT_WIDTH = 215; // three abreast
  const plots = new Map(JSON.parse(document.getElementById("plots").textContent).map((plot) => [plot.id, plot]));
  const waiting = new Set(plots.keys());
  const hidden = new Set();
  const state = document.documentElement.dataset;
  let drawn = 0;
  const touch = matchMedia("(pointer: coarse)").matches;

  const closed = (id) => document.getElementById(id).closest("details:not([open])") !== null;
  const visible = (trace) => !hidden.has((trace.meta || {}).line);
  const count = () => { state.plots = String([...plots.keys()].filter((id) => !waiting.has(id) || !closed(id)).length); };

  const draw = (id) => {
    if (!waiting.delete(id)) return;
    const plot = plots.get(id);
    plot.data.forEach((trace) => { trace.visible = visible(trace); });
    const layout = {
      ...plot.layout,
      autosize: true,
      uirevision: id,
      showlegend: false,
      hovermode: "closest",
      dragmode: touch ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { bgcolor: "#2b3138", bordercolor: "#8a949e", font: { color: "#ffffff" } },
    };
    const target = document.getElementById(id);
    const source = JSON.stringify(plot);
    const same = target.source === source;
    target.source = source;
    const done = same ? Promise.resolve() : Plotly.react(target, plot.data, layout, { responsive: true, displayModeBar: false });
    done.then(() => {
      if (over.signal.aborted) return;
      drawn += 1;
      state.drawn = String(drawn);
    });
  };

  const next = () => [...waiting].find((id) => !closed(id));
  const drawAll = () => [...waiting].filter((id) => !closed(id)).forEach(draw);
  const whenIdle = window.requestIdleCallback || ((work) => setTimeout(work, 50));
  const drawNext = () => {
    const id = next();
    if (id === undefined || over.signal.aborted) return;
    draw(id);
    whenIdle(drawNext);
  };

  const refresh = () => plots.forEach((plot, id) => {
    if (waiting.has(id)) return;
    const target = document.getElementById(id);
    if (target.data.some((trace) => trace.meta)) Plotly.restyle(target, { visible: target.data.map(visible) });
  });

  const take = (box) => {
    const line = Number(box.dataset.line);
    if (box.checked) hidden.delete(line); else hidden.add(line);
  };
  document.querySelectorAll("input[data-line]").forEach((box) => {
    take(box);
    box.addEventListener("change", () => { take(box); refresh(); }, { signal: over.signal });
  });

  // What is opened is drawn at once; what was drawn before takes the width that it has now.
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", () => {
    count();
    if (!part.open) return;
    part.querySelectorAll("[role=img]").forEach((target) => {
      if (closed(target.id)) return;
      if (waiting.has(target.id)) draw(target.id); else Plotly.Plots.resize(target);
    });
  }, { signal: over.signal }));

  // A link to what is behind a click opens it.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal, { signal: over.signal });

  addEventListener("beforeprint", () => {
    drawAll();
    plots.forEach((plot, id) => {
      const small = document.getElementById(id).closest(".small") !== null;
      if (!closed(id)) Plotly.relayout(id, { width: small ? SMALL_PRINT_WIDTH : PRINT_WIDTH });
    });
  }, { signal: over.signal });
  addEventListener("afterprint", () => plots.forEach((plot, id) => {
    if (!waiting.has(id)) Plotly.relayout(id, { width: null, autosize: true });
  }), { signal: over.signal });

  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !closed(entry.target.id)) draw(entry.target.id);
  }), { rootMargin: "200px" });
  plots.forEach((plot, id) => watcher.observe(document.getElementById(id)));
  over.signal.addEventListener("abort", () => watcher.disconnect());
  state.drawn = "0";
  count();
  whenIdle(drawNext);
  return reveal;
};
const crosstrainReveal = window.crosstrainDraw();
if (location.hash) crosstrainReveal();

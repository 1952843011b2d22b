// Draws the plots: those in view at once, the others when the browser is idle, all of them before the page is printed.
// To be called again where the page has been changed: plots that are drawn are brought up to date, as far as they differ.
window.crosstrainDraw = () => {
  "use strict";
  if (window.crosstrainOver) window.crosstrainOver.abort(); // what a call before this one listens to
  const over = window.crosstrainOver = new AbortController();
  const PRINT_WIDTH = 680; // a page of A4 or Letter without its margins, in pixels
  const plots = new Map(JSON.parse(document.getElementById("plots").textContent).map((plot) => [plot.id, plot]));
  const waiting = new Set(plots.keys());
  const hidden = new Set();
  let drawn = 0;
  const raw = document.getElementById("raw");
  const touch = matchMedia("(pointer: coarse)").matches;

  const visible = (trace) => {
    const meta = trace.meta || {};
    return !hidden.has(meta.run) && !(meta.kind === "faint" && raw && !raw.checked);
  };

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
      document.documentElement.dataset.drawn = String(drawn);
    });
  };

  const drawAll = () => [...waiting].forEach(draw);
  const whenIdle = window.requestIdleCallback || ((work) => setTimeout(work, 50));
  const drawNext = () => {
    const [next] = waiting;
    if (next === undefined || over.signal.aborted) return;
    draw(next);
    whenIdle(drawNext);
  };

  const refresh = () => plots.forEach((plot, id) => {
    if (waiting.has(id)) return;
    const target = document.getElementById(id);
    if (target.data.some((trace) => trace.meta)) Plotly.restyle(target, { visible: target.data.map(visible) });
  });

  const take = (box) => {
    const run = Number(box.dataset.run);
    if (box.checked) hidden.delete(run); else hidden.add(run);
    document.querySelectorAll(`figure[data-of="${run}"]`).forEach((figure) => { figure.hidden = !box.checked; });
  };
  document.querySelectorAll("input[data-run]").forEach((box) => {
    take(box);
    box.addEventListener("change", () => { take(box); refresh(); });
  });
  if (raw) raw.addEventListener("change", refresh);

  addEventListener("beforeprint", () => {
    drawAll();
    plots.forEach((plot, id) => Plotly.relayout(id, { width: PRINT_WIDTH }));
  }, { signal: over.signal });
  addEventListener("afterprint", () => plots.forEach((plot, id) => {
    Plotly.relayout(id, { width: null, autosize: true });
  }), { signal: over.signal });

  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) draw(entry.target.id);
  }), { rootMargin: "200px" });
  plots.forEach((plot, id) => watcher.observe(document.getElementById(id)));
  over.signal.addEventListener("abort", () => watcher.disconnect());
  document.documentElement.dataset.drawn = "0";
  document.documentElement.dataset.plots = String(plots.size);
  whenIdle(drawNext);
};
window.crosstrainDraw();

// Follows the runs: asks how they stand, and puts in what is new; scroll position, open details and ticked boxes stay as they are.
(() => {
  "use strict";
  const ASK_MILLISECONDS = 2000;
  const ANSWER_MILLISECONDS = 15000; // a machine at work may be slow, and then a page of megabytes takes its time
  const MOST_FAILURES = 2; // one may be chance
  const token = new URLSearchParams(location.search).get("token");
  const page = document.getElementById("live-page");
  const bar = document.getElementById("live");
  const style = document.head.appendChild(document.createElement("style"));
  let shown = 0;
  let refreshed = "";
  let failures = 0;

  class Unreachable extends Error {}

  const address = (path) => `${path}?token=${encodeURIComponent(token)}`;
  const ask = async (path) => {
    let answer;
    let text;
    try {
      answer = await fetch(address(path), { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MILLISECONDS) });
      text = await answer.text();
    } catch (error) {
      throw new Unreachable(path, { cause: error });
    }
    if (!answer.ok) throw new Error(`not refreshed: the answer was ${answer.status} (${text.trim()})`);
    return text;
  };

  // What the reader has done to the page, by the words that stand there: places and numbers change when a run is added.
  const words = (element) => element.textContent.replace(/\s+/g, " ").trim();
  const within = (element) => {
    const parts = [];
    for (let at = element.closest("[aria-labelledby]"); at; at = at.parentElement.closest("[aria-labelledby]")) {
      const label = document.getElementById(at.getAttribute("aria-labelledby"));
      parts.push(label ? words(label) : "");
    }
    return parts.join(" < ");
  };
  const nameOf = (element) => {
    if (element.matches("figure, main")) return "";
    if (element.matches("details")) return words(element.querySelector("summary") || element);
    if (element.matches("input")) return element.id || words(element.closest("label") || element);
    return element.getAttribute("aria-label") || words(element);
  };
  const named = (selector) => {
    const counts = new Map();
    const found = new Map();
    page.querySelectorAll(selector).forEach((element) => {
      const name = `${element.tagName} ${nameOf(element)} < ${within(element)}`;
      const count = counts.get(name) || 0;
      counts.set(name, count + 1);
      found.set(`${name} ${count}`, element);
    });
    return found;
  };
  const each = (kept, selector, put) => {
    if (!kept.size) return;
    named(selector).forEach((element, name) => { if (kept.has(name)) put(element, kept.get(name)); });
  };
  const kept = (selector, value) => new Map([...named(selector)].map(([name, element]) => [name, value(element)]));

  const HEADINGS = "h2, h3, figure";
  const FOCUSABLE = "a, summary, input, main, [tabindex]";
  const remember = () => {
    const above = [...named(HEADINGS)].filter(([, element]) => element.getBoundingClientRect().top <= 1).pop();
    const focused = [...named(FOCUSABLE)].find(([, element]) => element === document.activeElement);
    return {
      top: scrollY,
      anchor: scrollY > 0 && above ? { name: above[0], top: above[1].getBoundingClientRect().top } : null,
      focus: focused && focused[0],
      open: kept("details", (element) => element.open),
      ticked: kept("input[type=checkbox]", (element) => element.checked),
      sideways: kept(".scroll", (element) => element.scrollLeft),
    };
  };
  const restore = (before) => {
    each(before.open, "details", (element, open) => { element.open = open; });
    each(before.ticked, "input[type=checkbox]", (element, ticked) => { element.checked = ticked; });
    each(before.sideways, ".scroll", (element, left) => { element.scrollLeft = left; });
    const focus = before.focus && named(FOCUSABLE).get(before.focus);
    if (focus) focus.focus({ preventScroll: true });
  };
  const restorePlace = ({ top, anchor }) => {
    const now = anchor && named(HEADINGS).get(anchor.name);
    const place = now ? scrollY + now.getBoundingClientRect().top - anchor.top : top;
    if (Math.abs(place - scrollY) >= 1) scrollTo({ top: place, behavior: "instant" });
  };

  // A plot that is drawn stays in its place, so that it keeps what it is enlarged to, and only its lines change.
  const keepPlots = (fresh) => {
    const left = new Set(page.querySelectorAll(".js-plotly-plot"));
    left.forEach((old) => {
      const place = fresh.querySelector(`[id="${CSS.escape(old.id)}"]`);
      if (!place) return;
      ["aria-label", "style"].forEach((name) => old.setAttribute(name, place.getAttribute(name) || ""));
      place.replaceWith(old);
      left.delete(old);
    });
    left.forEach((old) => Plotly.purge(old));
  };

  const load = (path) => new Promise((loaded, failed) => {
    const script = document.createElement("script");
    script.addEventListener("load", loaded);
    script.addEventListener("error", () => failed(new Unreachable(path)));
    script.src = address(path);
    document.head.append(script);
  });

  const show = async (state) => {
    const text = await ask("/page");
    const next = new DOMParser().parseFromString(text, "text/html");
    const before = remember();
    const fresh = document.createDocumentFragment();
    fresh.append(...[...next.body.children].map((element) => document.adoptNode(element)));
    keepPlots(fresh);
    document.title = next.title;
    style.textContent = [...next.querySelectorAll("style")].map((element) => element.textContent).join("\n");
    page.replaceChildren(fresh);
    page.querySelector("header").append(bar);
    restore(before);
    if (window.crosstrainDraw) window.crosstrainDraw();
    else for (let number = 0; number < state.scripts; number += 1) await load(`/script-${number}.js`);
    restorePlace(before);
    shown = state.version;
    document.documentElement.dataset.version = String(shown);
  };

  const set = (id, text) => {
    const element = document.getElementById(id);
    if (element.textContent !== text) element.textContent = text; // what is set anew is read aloud anew
  };
  const tell = (state) => {
    const several = state.at_work ? `${state.at_work} of ${state.runs} runs at work` : `${state.runs} runs, ended`;
    const one = state.at_work ? "one run, at work" : "one run, ended";
    const work = !state.runs ? "waiting for a run" : state.runs === 1 ? one : several;
    if (state.read_at_unix_seconds !== null) refreshed = new Date(state.read_at_unix_seconds * 1000).toLocaleTimeString();
    set("live-state", `, last refreshed at ${refreshed || "-"}: ${work}`);
    set("live-end", state.runs && !state.at_work ? "All runs have ended; a run that goes on or comes is taken in." : "");
    const notes = document.getElementById("live-notes");
    if (JSON.stringify(state.notes) !== notes.dataset.notes) {
      notes.dataset.notes = JSON.stringify(state.notes);
      notes.replaceChildren(...state.notes.map((note) => Object.assign(document.createElement("li"), { textContent: note })));
      notes.hidden = !state.notes.length;
    }
  };
  const tellEnd = () => {
    document.querySelector("#live strong").textContent = "No longer live";
    set("live-state", refreshed && `, last refreshed at ${refreshed}`);
    set("live-end", "No longer refreshed: the command has ended.");
  };

  const inView = () => new Promise((seen) => {
    if (!document.hidden) { seen(); return; }
    document.addEventListener("visibilitychange", () => inView().then(seen), { once: true });
  });
  const pause = () => new Promise((over) => { setTimeout(over, ASK_MILLISECONDS); });
  const follow = async () => {
    for (;;) {
      await inView(); // a page that nobody sees asks for nothing
      try {
        const state = JSON.parse(await ask("/state"));
        if (state.version !== shown) await show(state);
        tell(state);
        failures = 0;
        document.querySelector("#live strong").textContent = "Live";
      } catch (error) {
        if (!error.cause || error.cause.name !== "TimeoutError") failures += 1; // a machine at work may take its time
        if (!(error instanceof Unreachable)) set("live-end", `No longer refreshed: ${error.message}`);
        else if (failures >= MOST_FAILURES) { tellEnd(); return; } // whoever has the port next is told nothing
        if (!(error instanceof Unreachable)) console.error(error);
      }
      await pause();
    }
  };
  follow();
})();

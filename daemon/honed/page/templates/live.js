// Makes a page live: updates its top line with each event, and with every few of them the parts that have changed.
// Content of events is only ever set as text.
"use strict";
(() => {
  const MIN_MSEC = 3000;
  const events = document.currentScript.dataset.events;
  let refreshedAt = Date.now(), timer = 0, isOver = false;
  const blocks = made => [...made.querySelectorAll("[data-block]")];
  const key = block => block.dataset.block;
  // The content as it was sent: scripts change what is shown.
  let sent = new Map(blocks(document).map(one => [key(one), one.innerHTML]));

  // While somebody selects text or holds a control, nothing under the pointer changes.
  const isHeld = () => {
    const selection = getSelection();
    return (selection && !selection.isCollapsed) || document.querySelector("input:active, .u-over:active");
  };
  const scrolls = made => [...made.querySelectorAll(".said,pre.block,.wide")];
  const replace = (old, made) => {
    const places = scrolls(old).map(one => [one.scrollTop, one.scrollLeft]);
    const open = new Map([...old.querySelectorAll("details")].map(one => [one.id || one.className, one.open]));
    const focus = old.contains(document.activeElement) ? document.activeElement : null;
    old.replaceChildren(...made.childNodes);
    scrolls(old).forEach((one, n) => { [one.scrollTop, one.scrollLeft] = places[n] || [0, 0]; });
    old.querySelectorAll("details").forEach(one => {
      const was = open.get(one.id || one.className);
      if (was !== undefined) one.open = was;
    });
    if (!focus) return;
    const same = [...old.querySelectorAll(focus.tagName)].find(one => ["id", "href", "value", "ariaLabel"]
      .every(name => (one[name] || "") === (focus[name] || "")) && one.textContent.length === focus.textContent.length);
    if (same) same.focus({preventScroll: true});
  };
  const refresh = async () => {
    timer = 0;
    if (isHeld() && !isOver) { later(); return; }
    refreshedAt = Date.now();
    const address = location.href;
    try {
      const answer = await fetch(address, {cache: "no-store"});
      if (!answer.ok) { later(); return; }
      const made = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (address !== location.href) return;
      document.title = made.title;
      const found = blocks(made), names = found.map(key);
      const next = new Map(found.map(one => [key(one), one.innerHTML]));
      if (String(names) === String(blocks(document).map(key))) {
        const here = new Map(blocks(document).map(one => [key(one), one]));
        for (const one of found) if (sent.get(key(one)) !== next.get(key(one))) replace(here.get(key(one)), one);
      } else {
        replace(document.querySelector("main"), made.querySelector("main"));
      }
      sent = next;
      document.dispatchEvent(new Event("refreshed"));
    } catch { later(); }
  };
  const later = () => {
    if (!timer) timer = setTimeout(refresh, Math.max(0, refreshedAt + MIN_MSEC - Date.now()));
  };
  // The address has changed: an answer to the one before is of no use.
  document.addEventListener("stale", () => { clearTimeout(timer); refresh(); });
  const source = new EventSource(events);
  source.addEventListener("progress", event => {
    const told = JSON.parse(event.data);
    const line = document.querySelector(".outcome");
    if (line && told.line) line.textContent = told.line;
    later();
  });
  source.addEventListener("changed", later);
  source.addEventListener("ended", event => {
    const news = document.querySelector("#news");
    if (news) news.textContent = `The job has ended: ${JSON.parse(event.data).state}.`;
    isOver = true;
    source.close();
    later();
  });
})();

// Makes a page live: updates its top line with each event, and loads the page again when there is more to show.
// Content of events is only ever set as text.
"use strict";
(() => {
  const MIN_MSEC = 3000;
  const address = document.currentScript.dataset.events;
  let refreshedAt = Date.now(), timer = 0, isOver = false;
  const source = new EventSource(address);
  const refresh = async () => {
    timer = 0;
    const selection = getSelection();
    if (selection && !selection.isCollapsed && !isOver) { later(); return; }
    refreshedAt = Date.now();
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (!answer.ok) { later(); return; }
      const made = new DOMParser().parseFromString(await answer.text(), "text/html");
      const places = [...document.querySelectorAll(".said,pre.block")].map(one => one.scrollTop);
      document.title = made.title;
      document.body.replaceChildren(...made.body.childNodes);
      [...document.querySelectorAll(".said,pre.block")].forEach((one, n) => { one.scrollTop = places[n] || 0; });
    } catch { later(); }
  };
  const later = () => {
    if (!timer) timer = setTimeout(refresh, Math.max(0, refreshedAt + MIN_MSEC - Date.now()));
  };
  source.addEventListener("progress", event => {
    const told = JSON.parse(event.data);
    const line = document.querySelector(".outcome");
    if (line && told.line) line.textContent = told.line;
    later();
  });
  source.addEventListener("changed", later);
  source.addEventListener("ended", () => { isOver = true; source.close(); later(); });
})();

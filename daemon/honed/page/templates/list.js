// The list of jobs: a filter as one types, and a choice of jobs to compare.
"use strict";
(() => {
  const filter = document.querySelector("#q"), button = document.querySelector("#compare");
  const news = document.querySelector("#news"), most = Number(button.dataset.max), chosen = new Set();
  let timer = 0;

  const show = () => {
    for (const cell of document.querySelectorAll(".choose")) cell.hidden = false;
    for (const box of document.querySelectorAll(".choose input")) {
      box.checked = chosen.has(box.value);
      box.disabled = !box.checked && chosen.size >= most;
    }
    button.disabled = chosen.size < 2;
    button.textContent = chosen.size ? `Compare ${chosen.size} jobs` : "Compare";
    button.title = chosen.size < 2 ? `Choose 2 to ${most} jobs in the list` : "";
  };
  document.addEventListener("change", event => {
    if (!event.target.closest(".choose")) return;
    if (event.target.checked) chosen.add(event.target.value); else chosen.delete(event.target.value);
    if (chosen.size === most) news.textContent = `${most} jobs are chosen, no more can be compared.`;
    show();
  });
  button.addEventListener("click", () => { location.href = `/compare?ids=${[...chosen].join(",")}`; });
  const search = () => {
    const address = new URL(location.href);
    if (filter.value) address.searchParams.set("q", filter.value); else address.searchParams.delete("q");
    address.searchParams.delete("before");
    history.replaceState(null, "", address);
    document.dispatchEvent(new Event("stale"));
  };
  const typed = () => { clearTimeout(timer); timer = setTimeout(search, 250); };
  filter.addEventListener("input", typed);
  if (filter.value !== filter.defaultValue) typed(); // before this script ran
  document.addEventListener("refreshed", show);
  document.querySelector(".tools").hidden = false;
  show();
})();

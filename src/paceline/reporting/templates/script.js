// Nothing depends on this: it adds a filter to the maps of blocks.
for (const section of document.querySelectorAll("main > section")) {
  const filter = section.querySelector(".filter");
  const rows = [...section.querySelectorAll("tr[data-refusal]")];
  if (!filter || rows.length === 0) continue;
  const select = filter.querySelector("select");
  const order = (a, b) => (a === "none") - (b === "none") || Number(a) - Number(b);
  const places = [...new Set(rows.map((row) => row.dataset.refusal))].sort(order);
  for (const place of ["any", ...places]) select.append(new Option(place, place));
  select.addEventListener("change", () => {
    for (const row of rows) row.hidden = select.value !== "any" && row.dataset.refusal !== select.value;
    if (select.value !== "any") for (const row of rows) row.closest("details").open = true;
  });
  filter.hidden = false;
}

// Starts the page.

(async () => {
  try {
    const data = await unpack();
    const picker = new Picker(data.plans, data.specs, data.colors);
    picker.follow();
    if (data.records.length) await showResults(data.records, data.specs);
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    byId("failure").textContent = `The page cannot show its data: ${error.message}. It needs a browser of 2023 or newer.`;
    byId("failure").hidden = false;
    throw error;
  }
})();

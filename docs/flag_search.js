// The search reads a leading dash as "without", and looks for each part of a word by itself. A flag is found as one types it,
// where all its parts are: `--algo.lopti.eta`, `lopti.eta` and, half typed, `--algo.lop`.
const QUERY = 2; // the type of the theme's message
const send = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message) {
  if (message.type === QUERY) {
    const data = message.data.replace(/(?<!\S)(?:--+(?=\w)[\w.-]+|[a-z]\w*\.[\w.]*)/gi, (flag) =>
      `${flag.split(/[.-]+/).filter(Boolean).map((part) => `+${part}`).join(" ")}* `);
    message = { ...message, data };
  }
  send.call(this, message);
};

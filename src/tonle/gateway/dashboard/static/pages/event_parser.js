// Reads a text/event-stream whose bytes come in pieces that are cut anywhere: inside a letter, a line or an event.
//
// Does: decode UTF-8, split lines (LF, CRLF, CR), join the data lines of an event. Does not: know what the data mean.

export class EventParser {
  #decoder = new TextDecoder();
  #line = ""; // begun, not ended
  #afterReturn = false; // the last character was CR: an LF that follows belongs to it
  #event = "";
  #data = [];

  // The events that end in `bytes`, each as {event, data}.
  push(bytes) {
    return this.#take(this.#decoder.decode(bytes, { stream: true }));
  }

  // What is left when the stream ends: an event without the empty line after it.
  end() {
    const found = this.#take(this.#decoder.decode());
    if (this.#line) this.#endLine();
    const last = this.#endEvent();
    return last ? [...found, last] : found;
  }

  #take(text) {
    const found = [];
    if (!text) return found;
    if (this.#afterReturn && text[0] === "\n") text = text.slice(1);
    this.#afterReturn = text.endsWith("\r");
    const lines = text.split(/\r\n|\n|\r/);
    lines[0] = this.#line + lines[0];
    this.#line = lines.pop();
    for (const line of lines) {
      if (line === "") {
        const event = this.#endEvent();
        if (event) found.push(event);
      } else {
        this.#field(line);
      }
    }
    return found;
  }

  #endLine() {
    this.#field(this.#line);
    this.#line = "";
  }

  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment, such as a heartbeat
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value[0] === " ") value = value.slice(1);
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
  }

  #endEvent() {
    const event = this.#data.length ? { event: this.#event || "message", data: this.#data.join("\n") } : null;
    this.#event = "";
    this.#data = [];
    return event;
  }
}

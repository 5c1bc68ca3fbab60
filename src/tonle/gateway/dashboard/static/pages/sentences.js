// A text that still grows into sentences, each as soon as it is known to have ended: tonle/workers/sentences.py in a browser.
//
// Does: the same as that file, rule by rule; tests/fakes/sentences.json holds both to the same cases. Does not: have rules of its own.

const MAX_CHARS = 240; // no sentence is longer
const PHRASE_CHARS = 30; // Thai and Lao end sentences with a space, and shorter phrases, too

const SPACES = " \t\r\n\u00a0\u200b\u3000";
const STRONG = "។៕。｡！？؟۔।॥။።"; // an end whatever follows
const MARKS = `${STRONG}.!?…`; // the others: where a space follows, and then no small letter
const CLOSING = "\"'”’»)]}*_」』】）》〉›"; // belong to the sentence that they follow
const KHMER_AND_SO_ON = "។ល។"; // "etc."
const THAI_REPEAT = "ๆ"; // "the word before, again": what follows belongs to it

// Words that a full stop belongs to, in small letters.
const ABBREVIATIONS = new Set([
  "mr", "mrs", "ms", "dr", "prof", "st", "mt", "gen", "sen", "rep", "rev", "hon", "capt", "lt", "col", "sgt", "vs", "nos",
  "fig", "figs", "vol", "vols", "pp", "eq", "ch", "dept", "approx", "ca", "cf", "viz", "jan", "feb", "apr", "jun", "jul", "aug",
  "sep", "sept", "oct", "nov", "dec", "mme", "mlle", "sr", "sra", "srta", "dra", "hr", "fr", "nr", "bzw", "tel", "tp", "ths",
]);
const WORD = /\p{L}[\p{L}.]*$/u; // the letters, and dots between them, right before a full stop
const LIST_NUMBER = /^\s*(?:[-*#>]+\s*)?\d{1,3}$/; // "1." at the beginning of a line of a list
const EMPHASIS = /`+|\*+(?=\S)|(?<=\S)\*+|\b_+|_+\b/g;
const BEGINNING = /^\s*(?:[-•>*]+|#{1,6})\s/; // of a line: a bullet, a heading
const SPACES_AROUND = new RegExp(`^[${SPACES}]+|[${SPACES}]+$`, "g");

export class SentenceSplitter {
  #text = ""; // begun, not ended: never longer than MAX_CHARS after a call

  // The sentences that end in `piece`, each with the space after it if that is known.
  push(piece) {
    this.#text += piece;
    const found = [];
    let start = 0;
    for (;;) {
      const length = firstEnd(this.#text.slice(start, start + MAX_CHARS));
      if (length === null) break;
      found.push(this.#text.slice(start, start + length));
      start += length;
    }
    this.#text = this.#text.slice(start);
    return found;
  }

  // The text is complete: the sentence that was begun, if there is one.
  end() {
    const rest = this.#text;
    this.#text = "";
    return rest ? [rest] : [];
  }
}

// Without marks of Markdown and spaces around; empty if there is no letter or digit to speak.
export function speakable(sentence) {
  const plain = sentence.replace(BEGINNING, "").replace(EMPHASIS, "").replace(SPACES_AROUND, "");
  return /[\p{L}\p{N}]/u.test(plain) ? plain : "";
}

// Letters of the first sentence in `window`; null: it cannot be known before more letters come. A window of MAX_CHARS is not
// waited for: it is cut.
function firstEnd(window) {
  for (let at = 0; at < window.length; at += 1) {
    const letter = window[at];
    let end = 0;
    if (letter === "\n") {
      end = window.slice(0, at).trim() ? at + 1 : 0;
    } else if (MARKS.includes(letter) && !(at && MARKS.includes(window[at - 1]))) {
      end = endByMarks(window, at); // a run is looked at from its first mark
    } else if (letter === " " && at >= PHRASE_CHARS && isThai(window[at - 1]) && window[at - 1] !== THAI_REPEAT) {
      const after = skip(window, at, SPACES);
      if (after === window.length) end = null;
      else if (isThai(window[after])) end = at + 1;
    }
    if (end === null) break;
    if (end) return end;
  }
  return window.length < MAX_CHARS ? null : cut(window);
}

// Of the sentence that the marks from `at` on end; 0: they end none; null: more letters are needed.
function endByMarks(window, at) {
  const after = skip(window, at + 1, MARKS + CLOSING);
  if (after === window.length) return null; // more marks may follow
  const marks = window.slice(at, after);
  if ([...marks].some((mark) => STRONG.includes(mark))) {
    if (KHMER_AND_SO_ON.startsWith(window.slice(at, at + 3)) && after === at + 1) return window.length < at + 3 ? null : 0;
    return after;
  }
  if (!SPACES.includes(window[after])) {
    return "!?".includes(window[at]) && /^\p{Lo}/u.test(letterAt(window, after)) ? after : 0; // scripts without capitals
  }
  if (marks === "." && isAbbreviation(window.slice(0, at))) return 0;
  const following = skip(window, after, SPACES);
  if (window.slice(after, following).includes("\n")) return after + 1;
  if (following === window.length) return null;
  return /^\p{Ll}/u.test(letterAt(window, following)) ? 0 : after + 1;
}

// Of the text before a full stop: "Dr", "J", "e.g", or the number of a list.
function isAbbreviation(before) {
  if (LIST_NUMBER.test(before.slice(before.lastIndexOf("\n") + 1))) return true;
  const word = before.match(WORD)?.[0];
  if (!word) return false;
  const isInitial = (each) => [...each].length === 1 && each.toLowerCase() !== each.toUpperCase();
  return word.split(".").every(isInitial) || ABBREVIATIONS.has(word.toLowerCase());
}

const letterAt = (window, at) => String.fromCodePoint(window.codePointAt(at));
const isThai = (letter) => letter >= "\u0e00" && letter <= "\u0eff"; // or Lao

function skip(window, at, letters) {
  while (at < window.length && letters.includes(window[at])) at += 1;
  return at;
}

// Where a piece without an end is cut: after a space in its second half, else before a letter with no marks on it.
function cut(window) {
  for (let at = window.length - 1; at > window.length / 2; at -= 1) {
    if (SPACES.includes(window[at])) return at + 1;
  }
  let at = window.length - 1;
  while (at > 1 && (/^[\p{M}\udc00-\udfff]/u.test(window[at]) || "\u17d2\u200d".includes(window[at - 1]))) at -= 1;
  return at > 1 ? at : window.length;
}

// Whether somebody speaks, by how loud it is: for talking without clicks.

const BEGIN_S = 0.2; // as long above the threshold is speech; a cough or a key is shorter
const END_S = 0.9; // as long below it ends what was said
const QUIET = 0.01; // of full scale; nothing below is speech
const ABOVE_NOISE = 3; // times the noise of the room
const NOISE_S = 2; // in which the noise is learnt; while it is loud, ten times as slowly

export class Activity {
  #noise = 0;
  #changing_s = 0; // how long it has been otherwise than `isSpeech` says
  isSpeech = false;

  // `level`: root mean square of the samples, 0 to 1, of the last `seconds`. Returns "began", "ended" or "".
  push(level, seconds) {
    const isLoud = level > Math.max(QUIET, ABOVE_NOISE * this.#noise);
    this.#noise += (level - this.#noise) * Math.min(1, seconds / (isLoud ? 10 * NOISE_S : NOISE_S));
    this.#changing_s = isLoud === this.isSpeech ? 0 : this.#changing_s + seconds;
    if (this.#changing_s < (this.isSpeech ? END_S : BEGIN_S) - 1e-9) return "";
    this.#changing_s = 0;
    this.isSpeech = isLoud;
    return isLoud ? "began" : "ended";
  }
}

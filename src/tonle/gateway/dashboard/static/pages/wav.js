// Sound as a WAV file: one channel, 16 bits. Every server of transcriptions reads it, whatever the browser records.

export const RATE = 16_000; // samples per second: what models of speech are trained on

// `channels`: arrays of samples from -1 to 1, of one length. They are mixed into one.
export function wavOf(channels, rate = RATE) {
  const length = channels[0]?.length ?? 0;
  const bytes = new DataView(new ArrayBuffer(44 + 2 * length));
  const put = (at, text) => [...text].forEach((letter, i) => bytes.setUint8(at + i, letter.charCodeAt(0)));
  put(0, "RIFF");
  bytes.setUint32(4, 36 + 2 * length, true);
  put(8, "WAVEfmt ");
  bytes.setUint32(16, 16, true); // bytes of this part
  bytes.setUint16(20, 1, true); // PCM
  bytes.setUint16(22, 1, true); // channels
  bytes.setUint32(24, rate, true);
  bytes.setUint32(28, 2 * rate, true); // bytes per second
  bytes.setUint16(32, 2, true); // bytes per sample
  bytes.setUint16(34, 16, true); // bits per sample
  put(36, "data");
  bytes.setUint32(40, 2 * length, true);
  for (let i = 0; i < length; i += 1) {
    let sum = 0;
    for (const channel of channels) sum += channel[i];
    const sample = Math.max(-1, Math.min(1, sum / channels.length));
    bytes.setInt16(44 + 2 * i, Math.round(sample * 32767), true);
  }
  return new Uint8Array(bytes.buffer);
}

// `buffer`, a WAV file that was streamed: whoever began it did not know its length, and not every browser reads such a file. Sets it.
export function withLength(buffer) {
  const bytes = new DataView(buffer);
  const name = (at) => String.fromCharCode(...new Uint8Array(buffer, at, 4));
  if (buffer.byteLength < 12 || name(0) !== "RIFF") return buffer;
  bytes.setUint32(4, buffer.byteLength - 8, true);
  for (let at = 12; at + 8 <= buffer.byteLength; ) {
    const size = bytes.getUint32(at + 4, true);
    if (name(at) === "data") {
      bytes.setUint32(at + 4, Math.min(size, buffer.byteLength - at - 8), true);
      break;
    }
    at += 8 + size + (size % 2);
  }
  return buffer;
}

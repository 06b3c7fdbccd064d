// The microphone's audio thread: joins blocks of 128 samples to pieces of about 40 ms and measures their level.

class MicrophoneProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.size = Math.round(0.04 * sampleRate);
    this.piece = new Float32Array(this.size);
    this.filled = 0;
    this.port.onmessage = () => this.send(); // "flush": hand over what there is
  }

  send() {
    const samples = this.piece.slice(0, this.filled);
    let power = 0;
    for (const s of samples) power += s * s;
    const level = samples.length ? Math.sqrt(power / samples.length) : 0;
    this.port.postMessage({ samples, level, last: this.filled < this.size }, [samples.buffer]);
    this.filled = 0;
  }

  process(inputs) {
    const block = inputs[0][0];
    if (!block) return true; // the microphone is not connected yet
    for (let i = 0; i < block.length; ) {
      const take = Math.min(block.length - i, this.size - this.filled);
      this.piece.set(block.subarray(i, i + take), this.filled);
      this.filled += take;
      i += take;
      if (this.filled === this.size) this.send();
    }
    return true;
  }
}

registerProcessor("stretto-microphone", MicrophoneProcessor);

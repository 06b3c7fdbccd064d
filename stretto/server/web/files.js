// Files to send: pictures, sound and video, kept as data URIs (which the page's policy lets it show). Pictures are made
// small enough; sound and video go as they are.

const LARGEST_SIDE = 1536;
const LARGEST_BYTES = 1_500_000;
const AS_IS = ["image/png", "image/jpeg", "image/webp"];
const ENDINGS = {
  image: /\.(png|jpe?g|webp|gif|bmp)$/i,
  audio: /\.(wav|mp3|flac|ogg|opus|m4a|aac|aiff?|amr|caf)$/i,
  video: /\.(mp4|m4v|mov|webm|mkv|avi|mpe?g|ts|3gp|flv)$/i,
};
const PLURAL = { image: "pictures", audio: "sound", video: "video" };

/** What the server said it takes. */
const limits = { kinds: ["image"], bytes: 0 };

export function setLimits({ kinds, bytes }) {
  Object.assign(limits, { kinds: Object.keys(ENDINGS).filter((kind) => kinds.includes(kind)), bytes });
}

/** For a file chooser. */
export const accepted = () => limits.kinds.map((kind) => `${kind}/*`).join(",");

/** "pictures, sound and video" */
export function taken() {
  const words = limits.kinds.map((kind) => PLURAL[kind]);
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : (words[0] ?? "no files");
}

/** "image", "audio", "video", or null. */
export function kindOf(file) {
  const told = file.type.split("/")[0];
  if (told in ENDINGS) return told;
  return Object.keys(ENDINGS).find((kind) => ENDINGS[kind].test(file.name)) ?? null;
}

export function readDataUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file could not be read."));
    reader.readAsDataURL(blob);
  });
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;

/** {kind, name, url}. Throws an Error with words for the reader. */
export async function readFile(file) {
  const name = file.name || "The file";
  const kind = kindOf(file);
  if (!kind || !limits.kinds.includes(kind)) throw new Error(`${name} cannot be sent: the model takes ${taken()}.`);
  if (!file.size) throw new Error(`${name} is empty.`);
  if (kind === "image") return { kind, name: file.name, url: await readImage(file) };
  const most = Math.floor(limits.bytes * 0.72); // base64 adds a third, and there are words beside it
  if (most && file.size > most) {
    throw new Error(`${name} is too large: ${megabytes(file.size)}, and this server takes ${megabytes(most)}.`);
  }
  return { kind, name: file.name, url: await readDataUri(file) };
}

/** A data URI of a picture, scaled down where it is large or of a rare type. */
async function readImage(file) {
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "The image"} cannot be read as an image.`);
  }
  const scale = Math.min(1, LARGEST_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= LARGEST_BYTES && AS_IS.includes(file.type)) return readDataUri(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const g = canvas.getContext("2d");
  g.fillStyle = "#fff"; // JPEG knows no transparency
  g.fillRect(0, 0, canvas.width, canvas.height);
  g.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/** A file as a part of a message. */
export function part({ kind, name, url }) {
  if (kind === "image") return { type: "image_url", image_url: { url } };
  if (kind === "video") return { type: "video_url", video_url: { url } };
  const format = /\.(\w+)$/.exec(name ?? "")?.[1]?.toLowerCase() ?? "wav";
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } };
}

// Images to send: read from files, made small enough, kept as data URIs (which the page's policy lets it show).

const LARGEST_SIDE = 1536;
const LARGEST_BYTES = 1_500_000;
const AS_IS = ["image/png", "image/jpeg", "image/webp"];

export const isImage = (file) => file.type.startsWith("image/");

function readDataUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The image could not be read."));
    reader.readAsDataURL(blob);
  });
}

/** {name, url}: a data URI of the file, scaled down where it is large or of a rare type. */
export async function readImage(file) {
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "The image"} cannot be read as an image.`);
  }
  const scale = Math.min(1, LARGEST_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= LARGEST_BYTES && AS_IS.includes(file.type)) {
    return { name: file.name, url: await readDataUri(file) };
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const g = canvas.getContext("2d");
  g.fillStyle = "#fff"; // JPEG knows no transparency
  g.fillRect(0, 0, canvas.width, canvas.height);
  g.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return { name: file.name, url: canvas.toDataURL("image/jpeg", 0.9) };
}

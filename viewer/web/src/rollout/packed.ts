// Arrays as the API sends them: little-endian bytes in base64.

import type { Packed } from "../types";

/** The last axis is the fastest. */
export type Numbers = ArrayLike<number>;

export function decode(array: Packed | null): Numbers | null {
  if (!array) return null;
  const { dtype, data } = array;
  const { buffer } = bytesOf(data);
  if (dtype === "uint8") return new Uint8Array(buffer);
  if (dtype === "int16") return new Int16Array(buffer);
  if (dtype === "float32") return new Float32Array(buffer);
  throw new Error(`an array of ${dtype}: this page reads uint8, int16 and float32`);
}

function bytesOf(base64: string): Uint8Array<ArrayBuffer> {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  return bytes;
}

// Arrays as the API sends them: little-endian bytes in base64.

import type { Packed } from "../types";

export interface NumberArray {
  shape: number[];
  values: ArrayLike<number>; // last axis fastest
}

export function decode(array: Packed | null | undefined): NumberArray | null {
  if (!array) return null;
  const { dtype, shape, data } = array;
  const { buffer } = bytesOf(data);
  if (dtype === "uint8") return { shape, values: new Uint8Array(buffer) };
  if (dtype === "int16") return { shape, values: new Int16Array(buffer) };
  if (dtype === "float32") return { shape, values: new Float32Array(buffer) };
  throw new Error(`an array of ${dtype}: this page reads uint8, int16 and float32`);
}

function bytesOf(base64: string): Uint8Array<ArrayBuffer> {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  return bytes;
}

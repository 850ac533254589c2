// Builds the pages into viewer/megatron_rl_viewer/static: app.js, app.css, index.html, icon.svg, colors.json, LICENSES.txt, sources.sha256.
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync, copyFileSync, existsSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
const OUT = join(HERE, "..", "megatron_rl_viewer", "static");

function filesOf(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) =>
    entry.isDirectory() ? filesOf(join(folder, entry.name)) : [join(folder, entry.name)],
  );
}

/** SHA-256 over "PATH NUL BYTES NUL" of every source and the lock, in the order of paths; a test computes it too. */
function sourcesHash() {
  const paths = [...filesOf(join(HERE, "src")), join(HERE, "build.mjs"), join(HERE, "package-lock.json")];
  const named = paths.map((path) => [relative(HERE, path).replaceAll("\\", "/"), path]);
  const hash = createHash("sha256");
  for (const [name, path] of named.sort(([a], [b]) => (a < b ? -1 : 1))) {
    hash.update(name).update("\0").update(readFileSync(path)).update("\0");
  }
  return hash.digest("hex");
}

/** The colours of colors.json as CSS variables: --text, --series-0, and the classes of each step of a scale. */
function colorCss() {
  const colors = JSON.parse(readFileSync(join(HERE, "src", "colors.json"), "utf8"));
  const variables = (mode) =>
    Object.entries(colors[mode])
      .flatMap(([name, value]) =>
        Array.isArray(value) ? value.map((color, step) => `--${name}-${step}:${color}`) : [`--${name}:${value}`],
      )
      .join(";");
  const steps = (name) =>
    colors.light[name].map((_, step) => `.${name}-${step}{background:var(--${name}-${step})}`).join("");
  return (
    `:root{color-scheme:light;${variables("light")}}\n` +
    `@media (prefers-color-scheme:dark){:root:not([data-theme=light]){color-scheme:dark;${variables("dark")}}}\n` +
    `:root[data-theme=dark]{color-scheme:dark;${variables("dark")}}\n` +
    ["series", "sequential", "diverging", "category", "heat"].map(steps).join("\n")
  );
}

/** The licence texts of the packages that are in the bundle. */
function licenses(inputs) {
  const packages = new Set(
    Object.keys(inputs)
      .map((path) => /node_modules\/((@[^/]+\/)?[^/]+)/.exec(path)?.[1])
      .filter(Boolean),
  );
  return [...packages]
    .sort()
    .map((name) => {
      const folder = join(HERE, "node_modules", name);
      const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      const file = ["LICENSE", "LICENSE.md", "LICENSE.txt"].map((file) => join(folder, file)).find(existsSync);
      return `${name} ${version} (${license})\n\n${file ? readFileSync(file, "utf8").trim() : ""}\n`;
    })
    .join("\n----------------------------------------------------------------\n\n");
}

mkdirSync(OUT, { recursive: true });
const generated = {
  name: "colors.css",
  setup(plugin) {
    plugin.onResolve({ filter: /^colors\.css$/ }, () => ({ path: "colors.css", namespace: "generated" }));
    plugin.onLoad({ filter: /.*/, namespace: "generated" }, () => ({ contents: colorCss(), loader: "css" }));
  },
};
const result = await build({
  entryPoints: { app: join(HERE, "src", "main.tsx") },
  outdir: OUT,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "ascii",
  metafile: true,
  logLevel: "warning",
  plugins: [generated],
  absWorkingDir: HERE,
});
copyFileSync(join(HERE, "src", "index.html"), join(OUT, "index.html"));
copyFileSync(join(HERE, "src", "icon.svg"), join(OUT, "icon.svg"));
copyFileSync(join(HERE, "src", "colors.json"), join(OUT, "colors.json")); // report.html has them too
writeFileSync(join(OUT, "LICENSES.txt"), licenses(result.metafile.inputs));
writeFileSync(join(OUT, "sources.sha256"), sourcesHash() + "\n");
const size = (name) => `${name} ${Math.round(readFileSync(join(OUT, name)).length / 1024)} KiB`;
console.log(`${relative(process.cwd(), OUT)}: ${size("app.js")}, ${size("app.css")}`);

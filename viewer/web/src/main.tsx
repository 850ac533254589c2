import { render } from "preact";
import { App } from "./App";
import { loadExport } from "./client";
import { setTheme, storedTheme } from "./theme";
import { Problem } from "./shared/Problem";
import "colors.css";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import "./controls.css";
import "./tables.css";
import "./rollout.css";
import "./episode.css";
import "./prompt.css";

setTheme(storedTheme());
const root = document.getElementById("app") as HTMLElement;
loadExport().then(
  () => render(<App />, root),
  (error: Error) => render(<Problem text={error.message} />, root),
);

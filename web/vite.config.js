// One script and one style sheet: Python puts both into the page, and names their hashes in its policy.
import { readFileSync } from "node:fs";
import { defineConfig } from "vite";

const LIBRARIES = ["uplot", "@dagrejs/dagre"];

const licences = {
  name: "licences",
  enforce: "post",
  generateBundle(_, bundle) {
    bundle["page.js"].code = `/* with uPlot (c) Leon Sorokin and dagre (c) Chris Pettitt, both MIT: tensorprobe/report/page/LICENSES.txt */\n${bundle["page.js"].code}`;
    const texts = LIBRARIES.map((name) => `${name}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`);
    this.emitFile({ type: "asset", fileName: "LICENSES.txt", source: texts.join("\n\n") });
  },
};

export default defineConfig({
  plugins: [licences],
  build: {
    outDir: "../src/tensorprobe/report/page",
    emptyOutDir: true,
    target: "es2021",
    cssCodeSplit: false,
    modulePreload: false,
    lib: { entry: "src/main.ts", formats: ["iife"], name: "tensorprobe", fileName: () => "page.js", cssFileName: "page" },
  },
});

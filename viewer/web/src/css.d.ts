// esbuild bundles style sheets; for TypeScript they have no content.
declare module "*.css";

// The colours of terminals (SGR, ECMA-48). Any other escape sequence is left out.
const SEQUENCE = /\x1b(?:\[([0-9;:]*)([@-~])?|[@-_])/g;

// Cuts a line into [text, class names], such as ["lost", "c1 bold"].
export function parts(line) {
  const found = [];
  let colour = "", isBold = false, end = 0;
  const add = (text) => {
    if (text) found.push([text, [colour, isBold ? "bold" : ""].filter(Boolean).join(" ")]);
  };
  for (const match of line.matchAll(SEQUENCE)) {
    add(line.slice(end, match.index));
    end = match.index + match[0].length;
    if (match[2] !== "m") continue;
    for (const code of match[1].split(";").map(Number)) {
      if (code === 0) [colour, isBold] = ["", false];
      else if (code === 1) isBold = true;
      else if (code === 22) isBold = false;
      else if (code === 39) colour = "";
      else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) colour = `c${code % 10}`;
    }
  }
  add(line.slice(end));
  return found;
}

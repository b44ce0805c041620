"use strict";
// A page from the file system may not start a worker: there the site's search runs in a frame of its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe"), waiting = [];
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      const deliver = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      this.postMessage = (data) => waiting.push(data);
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.postMessage = deliver;
        waiting.forEach(deliver);
      };
      inside.document.head.append(script);
    }
  };
}

// The site is read from a folder, too, where browsers start no worker of a file. The search then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      // a frame without a file of its own has the page's origin, so that both may call each other
      this.frame.srcdoc = "<!doctype html>";
      this.ready = new Promise((done) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
          this.load(url).then(() => done(inside));
        };
      });
      document.documentElement.append(this.frame);
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: new URL(url, document.baseURI), onload: done, onerror: failed });
        this.frame.contentDocument.head.append(script);
      });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

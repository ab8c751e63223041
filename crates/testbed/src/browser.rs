//! A headless Chromium inside a network namespace, driven by WebDriver.

mod webdriver;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

pub use self::webdriver::key;

use self::webdriver::Session;
use crate::agent::{DEADLINE, wait_until};
use crate::netns::NetNs;

/// The flags suppress requests other than the tests' own. Chromium has no sandbox for root.
const FLAGS: [&str; 10] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    // A failing name look-up delays the start by seconds.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
];

/// A browser that ends on drop, with all of its processes.
pub struct Browser<'a> {
    ns: &'a NetNs,
    runtime: Runtime,
    session: Session,
    _driver: Driver,
    _profile: TempDir,
}

impl<'a> Browser<'a> {
    /// Starts a browser with further `flags`, and with or without JavaScript.
    pub fn start(ns: &'a NetNs, flags: &[&str], javascript: bool) -> Result<Self> {
        let driver = Driver::start(ns)?;
        let profile = TempDir::with_prefix("kpx-chromium-")?;
        let profile_flag = format!("--user-data-dir={}", profile.path().display());
        let args = [&FLAGS, flags, &[profile_flag.as_str()]].concat();
        let allowed = if javascript { 1 } else { 2 };
        let capabilities = json!({ "goog:chromeOptions": {
            "args": args,
            "prefs": { "profile.default_content_setting_values.javascript": allowed },
        } });
        // A socket belongs to the namespace of the thread that creates it, so the runtime runs on
        // the caller's thread.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let session = ns
            .run(|| runtime.block_on(Session::start(driver.addr, &capabilities)))
            .context("start Chromium")?;
        Ok(Self {
            ns,
            runtime,
            session,
            _driver: driver,
            _profile: profile,
        })
    }

    pub fn open(&self, url: &str) -> Result<()> {
        self.drive(self.session.open(url))
            .with_context(|| format!("open {url}"))
    }

    /// Gives the page the width and height of a phone or of another screen, in CSS pixels.
    pub fn resize(&self, width: u32, height: u32) -> Result<()> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640 });
        self.drive(
            self.session
                .devtools("Emulation.setDeviceMetricsOverride", size),
        )
        .with_context(|| format!("resize to {width}×{height}"))
    }

    /// Sets the system's theme: `light` or `dark`.
    pub fn theme(&self, theme: &str) -> Result<()> {
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": theme }] });
        self.drive(self.session.devtools("Emulation.setEmulatedMedia", media))
            .with_context(|| format!("choose the theme {theme}"))
    }

    /// Runs a script at the beginning of every page that is opened from now on.
    pub fn begin_with(&self, script: &str) -> Result<()> {
        let command = "Page.addScriptToEvaluateOnNewDocument";
        self.drive(self.session.devtools(command, json!({ "source": script })))
            .with_context(|| format!("add {script}"))
    }

    /// Returns the result of a JavaScript function body.
    pub fn eval(&self, body: &str) -> Result<Value> {
        self.drive(self.session.eval(body))
            .with_context(|| format!("run {body}"))
    }

    pub fn strings(&self, body: &str) -> Result<Vec<String>> {
        Ok(serde_json::from_value(self.eval(body)?)?)
    }

    /// Waits until an expression is true. Exceptions count as false.
    pub fn wait(&self, expression: &str) -> Result<()> {
        let body = format!("try {{ return Boolean({expression}) }} catch {{ return false }}");
        wait_until(DEADLINE, expression, || Ok(self.eval(&body)? == true))
            .with_context(|| format!("the page shows: {}", self.text("body").unwrap_or_default()))
    }

    /// Returns the text as rendered.
    pub fn text(&self, selector: &str) -> Result<String> {
        let text = async { self.session.text(&self.session.find(selector).await?).await };
        self.drive(text).with_context(|| format!("read {selector}"))
    }

    pub fn click(&self, selector: &str) -> Result<()> {
        let click = async {
            self.session
                .click(&self.session.find(selector).await?)
                .await
        };
        self.drive(click)
            .with_context(|| format!("click {selector}"))
    }

    /// Presses keys in the focused element.
    pub fn press(&self, keys: &str) -> Result<()> {
        let press = async { self.session.press(&self.session.focus().await?, keys).await };
        self.drive(press).with_context(|| format!("press {keys}"))
    }

    /// Writes a picture of the window to a file.
    pub fn photograph(&self, file: &Path) -> Result<()> {
        let picture = BASE64_STANDARD.decode(self.drive(self.session.picture())?)?;
        std::fs::write(file, picture).with_context(|| format!("write {}", file.display()))
    }

    /// Fails if axe-core finds an accessibility fault, here or on a phone in the dark theme, or if
    /// the page is wider than the window or the phone. Takes a picture for the docs if `KPX_PICTURES`
    /// is set.
    pub fn accept(&self, name: &str) -> Result<()> {
        self.judge(name)?;
        let size = self.eval("return [innerWidth, innerHeight]")?;
        let [width, height]: [u32; 2] = serde_json::from_value(size)?;
        let wide = self.eval("return document.documentElement.scrollWidth")?;
        ensure!(
            wide.as_u64() <= Some(width.into()),
            "{name} has a width of {wide}"
        );
        self.theme("dark")?;
        self.resize(400, 800)?;
        // Colours fade from theme to theme.
        self.wait("innerWidth === 400 && document.getAnimations().every((one) => !(one instanceof CSSTransition))")?;
        self.judge(&format!("{name} on a dark phone"))?;
        let wide = self.eval("return document.documentElement.scrollWidth")?;
        ensure!(wide == 400, "{name} has a width of {wide} on a phone");
        self.theme("light")?;
        self.resize(width, height)?;
        self.wait(&format!("innerWidth === {width}"))?;
        match pictures() {
            Some(folder) => self.photograph_widths(&folder, name),
            None => Ok(()),
        }
    }

    fn judge(&self, name: &str) -> Result<()> {
        let axe = std::fs::read_to_string(axe())
            .context("read axe-core: `cargo xtask setup` installs it")?;
        let run =
            "return axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations.map((found) =>
            found.id + ': ' + found.nodes.map((node) => node.target + ' ' + node.failureSummary).join('; ')))";
        let found = self.strings(&format!("{axe}; {run}"))?;
        ensure!(found.is_empty(), "{name}: {found:#?}");
        Ok(())
    }

    /// Takes a picture for the docs, without room below the content, and more for a look at narrow
    /// screens and the dark theme.
    fn photograph_widths(&self, folder: &Path, name: &str) -> Result<()> {
        for (kind, width, height, theme) in [
            ("-phone-dark", 400, 800, "dark"),
            ("-phone", 400, 800, "light"),
            ("-dark", 1400, 860, "dark"),
            ("", 1400, 860, "light"),
        ] {
            self.theme(theme)?;
            self.resize(width, height)?;
            self.wait(&format!("innerWidth === {width}"))?;
            let content =
                self.eval("return Math.ceil(document.body.getBoundingClientRect().height)")?;
            let content = content.as_u64().and_then(|content| content.try_into().ok());
            self.resize(
                width,
                content.map_or(height, |content: u32| content.min(height)),
            )?;
            self.photograph(&folder.join(format!("{name}{kind}.png")))?;
        }
        Ok(())
    }

    fn drive<T: Send>(&self, work: impl Future<Output = Result<T>> + Send) -> Result<T> {
        self.ns.run(|| self.runtime.block_on(work))
    }
}

/// Returns the folder for pictures, if set.
pub fn pictures() -> Option<PathBuf> {
    std::env::var_os("KPX_PICTURES").map(PathBuf::from)
}

/// Returns the file of axe-core, from `cargo xtask setup`.
fn axe() -> PathBuf {
    let own = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../target/tools/axe-core@4.14.1/package/axe.min.js"
    );
    std::env::var_os("AXE").map_or_else(|| own.into(), PathBuf::from)
}

/// Runs in its own PID namespace, so that all of the browser's processes end with it.
struct Driver {
    process: Child,
    addr: SocketAddr,
}

impl Driver {
    fn start(ns: &NetNs) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args([
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "chromedriver",
            "--port=0",
        ]);
        let process = ns.spawn(command.stdout(Stdio::piped()).stderr(Stdio::null()))?;
        let mut driver = Self {
            process,
            addr: ([127, 0, 0, 1], 0).into(),
        };
        let output = driver.process.stdout.take().context("it is piped")?;
        for line in BufReader::new(output).lines() {
            let line = line?;
            if let Some((_, port)) = line.split_once("started successfully on port ") {
                driver.addr.set_port(
                    port.trim_end_matches('.')
                        .parse()
                        .with_context(|| line.clone())?,
                );
                return Ok(driver);
            }
        }
        ensure!(false, "chromedriver ended without a port");
        Ok(driver)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ended = self
            .process
            .kill()
            .and_then(|()| self.process.wait().map(drop));
    }
}

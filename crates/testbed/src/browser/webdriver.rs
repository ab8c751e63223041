//! The WebDriver commands that the tests need, as JSON over HTTP.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// The key of an element's id in answers (WebDriver, 12.2).
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// Keys without a printable character (WebDriver, 17.4.2).
pub mod key {
    pub const BACKSPACE: &str = "\u{e003}";
    pub const ENTER: &str = "\u{e007}";
    pub const ESCAPE: &str = "\u{e00c}";
    pub const LEFT: &str = "\u{e012}";
    pub const DOWN: &str = "\u{e015}";
}

/// A session of a driver, which ends with the driver.
pub(super) struct Session {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
}

impl Session {
    pub(super) async fn start(driver: SocketAddr, capabilities: &Value) -> Result<Self> {
        let client = Client::builder(TokioExecutor::new()).build_http();
        let mut session = Self {
            client,
            url: format!("http://{driver}/session"),
        };
        let body = json!({ "capabilities": { "alwaysMatch": capabilities } });
        let answer = session.send(Method::POST, "", Some(&body)).await?;
        let id = answer["sessionId"]
            .as_str()
            .context("the driver names no session")?;
        session.url = format!("{}/{id}", session.url);
        Ok(session)
    }

    pub(super) async fn open(&self, url: &str) -> Result<()> {
        self.post("/url", json!({ "url": url })).await.map(drop)
    }

    /// Runs the body of a JavaScript function. Returns its value.
    pub(super) async fn eval(&self, body: &str) -> Result<Value> {
        self.post("/execute/sync", json!({ "script": body, "args": [] }))
            .await
    }

    /// Runs a command of the Chrome DevTools Protocol.
    pub(super) async fn devtools(&self, command: &str, params: Value) -> Result<()> {
        let body = json!({ "cmd": command, "params": params });
        self.post("/goog/cdp/execute", body).await.map(drop)
    }

    /// Returns the path of the first element that matches a CSS selector.
    pub(super) async fn find(&self, selector: &str) -> Result<String> {
        element(
            &self
                .post(
                    "/element",
                    json!({ "using": "css selector", "value": selector }),
                )
                .await?,
        )
    }

    /// Returns the path of the focused element.
    pub(super) async fn focus(&self) -> Result<String> {
        element(&self.send(Method::GET, "/element/active", None).await?)
    }

    pub(super) async fn text(&self, element: &str) -> Result<String> {
        let text = self
            .send(Method::GET, &format!("{element}/text"), None)
            .await?;
        Ok(text.as_str().context("the text is no string")?.to_owned())
    }

    pub(super) async fn click(&self, element: &str) -> Result<()> {
        self.post(&format!("{element}/click"), json!({}))
            .await
            .map(drop)
    }

    /// Returns a picture of the window, as PNG in base64.
    pub(super) async fn picture(&self) -> Result<String> {
        let picture = self.send(Method::GET, "/screenshot", None).await?;
        Ok(picture
            .as_str()
            .context("the picture is no text")?
            .to_owned())
    }

    pub(super) async fn press(&self, element: &str, keys: &str) -> Result<()> {
        self.post(&format!("{element}/value"), json!({ "text": keys }))
            .await
            .map(drop)
    }

    async fn post(&self, command: &str, body: Value) -> Result<Value> {
        self.send(Method::POST, command, Some(&body)).await
    }

    async fn send(&self, method: Method, command: &str, body: Option<&Value>) -> Result<Value> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{command}", self.url));
        let request = request
            .header("content-type", "application/json")
            .body(Full::from(body))?;
        let (head, body) = self.client.request(request).await?.into_parts();
        let mut answer: Value = serde_json::from_slice(&body.collect().await?.to_bytes())?;
        let value = answer["value"].take();
        ensure!(
            head.status.is_success(),
            "{}: {}",
            value["error"],
            value["message"]
        );
        Ok(value)
    }
}

fn element(answer: &Value) -> Result<String> {
    let id = answer[ELEMENT]
        .as_str()
        .context("the answer names no element")?;
    Ok(format!("/element/{id}"))
}

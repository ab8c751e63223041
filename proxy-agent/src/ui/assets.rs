//! The page's files, which are part of the binary.

use axum::Router;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderMap, HeaderValue, StatusCode, header};

/// The hash of a file's content, by which a browser finds files of another version.
const CRC: crc::Crc<u64> = crc::Crc::<u64>::new(&crc::CRC_64_XZ);

struct Asset {
    /// The path below `/ui/`.
    name: &'static str,
    content_type: &'static str,
    content: &'static str,
}

macro_rules! assets {
    ($($name:literal: $content_type:expr,)*) => {
        [$(Asset { name: $name, content_type: $content_type, content: include_str!(concat!("assets/", $name)) }),*]
    };
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

const PAGE: &str = "index.html";
static ASSETS: [Asset; 23] = assets! {
    "index.html": HTML,
    "style.css": CSS,
    "icon.svg": SVG,
    "agent.js": SCRIPT,
    "controls.js": SCRIPT,
    "dom.js": SCRIPT,
    "history.js": SCRIPT,
    "live.js": SCRIPT,
    "main.js": SCRIPT,
    "map.js": SCRIPT,
    "model.js": SCRIPT,
    "node.js": SCRIPT,
    "nodes.js": SCRIPT,
    "overview.js": SCRIPT,
    "place.js": SCRIPT,
    "problems.js": SCRIPT,
    "rates.js": SCRIPT,
    "service.js": SCRIPT,
    "services.js": SCRIPT,
    "spark.js": SCRIPT,
    "text.js": SCRIPT,
    "theme.js": SCRIPT,
    "trace.js": SCRIPT,
};

/// What a page shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    Node,
    Cluster,
}

/// The beginning of the page of a node, and that of the page of a cluster: its scripts read what
/// they show from it, before the first answer.
const BEGINNINGS: [&str; 2] = [
    "<html lang=\"en\">",
    "<html lang=\"en\" data-of=\"cluster\">",
];

/// Returns the page at `/ui/`, and its other files below it.
pub(super) fn router<S: Clone + Send + Sync + 'static>(of: Of) -> Router<S> {
    ASSETS.iter().fold(Router::new(), |router, asset| {
        let content: Bytes = if asset.name == PAGE && of == Of::Cluster {
            asset.content.replace(BEGINNINGS[0], BEGINNINGS[1]).into()
        } else {
            asset.content.into()
        };
        let path = if asset.name == PAGE {
            "/ui/".to_owned()
        } else {
            format!("/ui/{}", asset.name)
        };
        let tag = format!("\"{:016x}\"", CRC.checksum(&content));
        let tag = HeaderValue::from_str(&tag).expect("hexadecimal digits make a header");
        router.route(
            &path,
            get(move |headers: HeaderMap| {
                std::future::ready(serve(asset, &content, &tag, &headers))
            }),
        )
    })
}

/// Serves a file. The browser must validate its copy each time, because kpx may have been upgraded.
fn serve(asset: &Asset, content: &Bytes, tag: &HeaderValue, request: &HeaderMap) -> Response {
    let caching = [
        (header::ETAG, tag.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    let is_kept = |tags: &HeaderValue| {
        let tags = tags.to_str().unwrap_or_default();
        tags.split(',')
            .any(|kept| kept.trim().trim_start_matches("W/").as_bytes() == tag.as_bytes())
    };
    if request.get_all(header::IF_NONE_MATCH).iter().any(is_kept) {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    let content_type = [(
        header::CONTENT_TYPE,
        HeaderValue::from_static(asset.content_type),
    )];
    (caching, content_type, content.clone()).into_response()
}

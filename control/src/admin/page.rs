//! The page for people: files that are part of the program.
//!
//! The browser is told to take nothing from elsewhere and to run no script but these. Should what a
//! peer calls itself ever be taken for markup, it could do nothing.

use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};

/// What the browser may load, and from where: our own files and answers.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page itself.
pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // After an update of the gateway, the page must not be that of the version before.
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, Html(include_str!("page/index.html"))).into_response()
}

/// A file that the page needs.
pub(super) async fn file(Path(name): Path<String>) -> Response {
    let Some((_, kind, text)) = FILES.iter().find(|(known, _, _)| *known == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let headers = [
        (header::CONTENT_TYPE, *kind),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, *text).into_response()
}

/// Name, type and content of each.
pub(super) const FILES: [(&str, &str, &str); 8] = [
    ("style.css", CSS, include_str!("page/style.css")),
    ("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("main.js", JAVASCRIPT, include_str!("page/main.js")),
    ("units.js", JAVASCRIPT, include_str!("page/units.js")),
    ("figures.js", JAVASCRIPT, include_str!("page/figures.js")),
    ("plots.js", JAVASCRIPT, include_str!("page/plots.js")),
    ("sections.js", JAVASCRIPT, include_str!("page/sections.js")),
    ("connections.js", JAVASCRIPT, include_str!("page/connections.js")),
];

const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

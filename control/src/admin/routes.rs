//! What each path answers.

use std::net::{IpAddr, SocketAddr};

use axum::Json;
use axum::Router;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::json;

use super::asking::{Desk, Silent};
use super::history::Keeper;
use super::{metrics, page};
use crate::operate::{OperateError, Operation};
use crate::stats::{ConnectionQuery, PER_PAGE_MAX, Readiness, SCHEMA, Sort, Transport};

/// All paths of the endpoint that listens at `local`.
pub(super) fn router(desk: Desk, history: Keeper, local: SocketAddr) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/page/{file}", get(page::file))
        .route("/stats", get(stats))
        .route("/connections", get(connections))
        .route("/history", get(async move || Json(history.columns())))
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(async || Json(json!({"status": "ok"}))))
        .route("/readyz", get(ready))
        .route("/config", get(config))
        .route("/operate", post(operate))
        .fallback(async || refusal(StatusCode::NOT_FOUND, "no such path; try /stats"))
        .method_not_allowed_fallback(async || {
            refusal(StatusCode::METHOD_NOT_ALLOWED, "GET everything, POST /operate only")
        })
        .layer(middleware::from_fn_with_state(local, check_name))
        .with_state(desk)
}

async fn check_name(State(local): State<SocketAddr>, request: Request, next: Next) -> Response {
    if is_named_well(local, &request) {
        next.run(request).await
    } else {
        refusal(StatusCode::FORBIDDEN, "name this endpoint by its address")
    }
}

/// Whether a request names this endpoint as it should.
///
/// The owner of a web page can make a name of theirs lead to this host. The browser then takes
/// their page for one of ours. So a request to operate must name this host by its address, and so
/// must every request where only this host can ask; elsewhere monitoring reads by name.
fn is_named_well(local: SocketAddr, request: &Request) -> bool {
    let reads = request.method() == Method::GET || request.method() == Method::HEAD;
    // Browsers always say it; health checks of HTTP/1.0 do not.
    let Some(host) = request.headers().get(header::HOST) else { return reads };
    let host = host.to_str().unwrap_or_default();
    let is_address = host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok();
    let is_local = host == "localhost" || host.starts_with("localhost:");
    is_address || is_local || reads && !local.ip().is_loopback()
}

/// The query string of `/connections`, as it was typed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Filters {
    listener: Option<String>,
    transport: Option<String>,
    page: Option<u32>,
    per_page: Option<u32>,
    search: Option<String>,
    sort: Option<String>,
}

impl Filters {
    /// The query, or what is wrong with it.
    fn check(self) -> Result<ConnectionQuery, String> {
        let defaults = ConnectionQuery::default();
        let transport = match self.transport.as_deref() {
            None | Some("") => None,
            Some(name) => Some(
                Transport::from_name(name)
                    .ok_or_else(|| format!("transport is smc-r or tcp, not {name:?}"))?,
            ),
        };
        let page = self.page.unwrap_or(defaults.page);
        if page == 0 {
            return Err("the first page is 1".to_owned());
        }
        let per_page = self.per_page.unwrap_or(defaults.per_page);
        if !(1..=PER_PAGE_MAX).contains(&per_page) {
            return Err(format!("per_page is 1 to {PER_PAGE_MAX}, not {per_page}"));
        }
        let listener = self.listener.filter(|name| !name.is_empty());
        let sort = match self.sort.as_deref() {
            None | Some("") => defaults.sort,
            Some(name) => Sort::from_name(name)
                .ok_or_else(|| format!("sort is place, bytes, oldest or youngest, not {name:?}"))?,
        };
        let search = self.search.unwrap_or_default();
        Ok(ConnectionQuery { listener, transport, page, per_page, search, sort })
    }
}

async fn stats(State(desk): State<Desk>) -> Result<Response, Silent> {
    Ok(Json(desk.ask(|it| it.stats()).await?).into_response())
}

async fn connections(
    State(desk): State<Desk>,
    filters: Result<Query<Filters>, QueryRejection>,
) -> Result<Response, Silent> {
    let query = match filters {
        Ok(Query(filters)) => filters.check(),
        Err(rejection) => Err(rejection.body_text()),
    };
    Ok(match query {
        Ok(query) => Json(desk.ask(|it| it.connections(query)).await?).into_response(),
        Err(why) => refusal(StatusCode::BAD_REQUEST, &why),
    })
}

async fn metrics_text(State(desk): State<Desk>, headers: HeaderMap) -> Result<Response, Silent> {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = metrics::Format::for_accept(accept.unwrap_or_default());
    let kind = [(header::CONTENT_TYPE, format.content_type())];
    let figures = desk.ask(|it| it.figures()).await?;
    Ok((kind, metrics::text(figures, format)).into_response())
}

/// The configuration in force, with all defaults, in the words of the file.
async fn config(State(desk): State<Desk>) -> Result<Response, Silent> {
    Ok(Json(desk.ask(|it| it.config()).await?.to_json()).into_response())
}

/// The query string of `/readyz`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    listener: Option<String>,
}

async fn ready(State(desk): State<Desk>, about: Result<Query<About>, QueryRejection>) -> Response {
    let about = match about {
        Ok(Query(about)) => about,
        Err(rejection) => return refusal(StatusCode::BAD_REQUEST, &rejection.body_text()),
    };
    let silent = |Silent| Readiness { reasons: vec![OperateError::Silent.to_string()] };
    let readiness = desk.ask(|it| it.ready(about.listener)).await.unwrap_or_else(silent);
    if readiness.is_ready() {
        return Json(json!({"status": "ready"})).into_response();
    }
    let body = json!({"error": "not ready", "reasons": readiness.reasons});
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

/// Obeys an operator.
async fn operate(
    State(desk): State<Desk>,
    body: Result<Json<Operation>, JsonRejection>,
) -> Response {
    let operation = match body {
        Ok(Json(operation)) => operation,
        Err(rejection) => return refusal(rejection.status(), &rejection.body_text()),
    };
    // Names are resolved for some of them, which takes time; statistics are read meanwhile.
    let provider = desk.provider();
    let outcome = tokio::task::spawn_blocking(move || provider.operate(operation)).await;
    match outcome.unwrap_or(Err(OperateError::Silent)) {
        Ok(notes) => {
            Json(json!({"schema": SCHEMA, "status": "begun", "notes": notes})).into_response()
        }
        Err(error) => {
            let status = match error {
                OperateError::Unknown(_) => StatusCode::NOT_FOUND,
                OperateError::Refused(_) => StatusCode::CONFLICT,
                OperateError::Wrong(_) => StatusCode::UNPROCESSABLE_ENTITY,
                OperateError::Silent => StatusCode::SERVICE_UNAVAILABLE,
            };
            refusal(status, &error.to_string())
        }
    }
}

impl IntoResponse for Silent {
    fn into_response(self) -> Response {
        refusal(StatusCode::SERVICE_UNAVAILABLE, &OperateError::Silent.to_string())
    }
}

fn refusal(status: StatusCode, why: &str) -> Response {
    (status, Json(json!({ "error": why }))).into_response()
}

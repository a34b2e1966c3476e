//! Counts calls of the API by method and code, and the time to their answer.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Mutex, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tonic::{
    Code,
    body::Body,
    codegen::{BoxFuture, Service, http},
};

use super::families::{Families, Histogram, as_f64};
use crate::auth::rule;

/// Upper bounds of latencies, in milliseconds; more is the last bucket's.
const BOUNDS_MS: [u64; 12] = [1, 2, 5, 10, 20, 50, 100, 500, 1000, 5000, 20_000, 60_000];
/// Counts of calls by method.
#[derive(Debug, Default)]
pub struct Calls(Mutex<BTreeMap<&'static str, Method>>);

#[derive(Debug, Default)]
struct Method {
    codes: BTreeMap<&'static str, u64>,
    seconds: f64,
    buckets: [u64; BOUNDS_MS.len() + 1],
}

impl Calls {
    fn note(&self, method: &'static str, code: Code, took: Duration) {
        let mut methods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = methods.entry(method).or_default();
        *counts.codes.entry(name(code)).or_default() += 1;
        counts.seconds += took.as_secs_f64();
        let millis = took.as_millis();
        let bucket = BOUNDS_MS.iter().position(|bound| millis < u128::from(*bound));
        if let Some(count) = counts.buckets.get_mut(bucket.unwrap_or(BOUNDS_MS.len())) {
            *count += 1;
        }
    }

    /// Adds their figures.
    pub fn add(&self, families: &mut Families) {
        let methods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (method, counts) in methods.iter() {
            for (code, count) in &counts.codes {
                families.counter(
                    "vmmd_rpcs",
                    "Calls of the API; of a stream, whether it began",
                    &[("method", method), ("code", code)],
                    *count,
                );
            }
            let bounds = BOUNDS_MS
                .iter()
                .map(|bound| as_f64(*bound) / 1000.0)
                .chain([f64::INFINITY]);
            let histogram = Histogram {
                sum: counts.seconds,
                buckets: bounds.zip(counts.buckets).collect(),
            };
            families.histogram(
                "vmmd_rpc_duration_seconds",
                "Time from a call's headers to its answer's; of a stream, until it began",
                &[("method", method)],
                histogram,
            );
        }
    }
}

/// As in the documentation of gRPC.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The method of a path such as "/vmmd.v1.VmService/GetVm", as "VmService/GetVm"; `None` when the API has no such method.
fn method(path: &str) -> Option<&'static str> {
    rule::find(path)?.method.strip_prefix("vmmd.v1.")
}

/// A service whose calls are counted.
#[derive(Clone, Debug)]
pub struct Counted<S>(S);

impl<S> Counted<S> {
    /// Counts the calls of `inner`.
    pub fn new(inner: S) -> Self {
        Self(inner)
    }
}

impl<S, B> Service<http::Request<B>> for Counted<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let method = method(request.uri().path());
        let began = Instant::now();
        let answer = self.0.call(request);
        Box::pin(async move {
            let response = answer.await?;
            if let Some(method) = method {
                // A refusal is in the headers; without one the call, or its stream, was taken up.
                let code = response
                    .headers()
                    .get("grpc-status")
                    .map(|status| Code::from_bytes(status.as_bytes()));
                super::rpcs().note(method, code.unwrap_or(Code::Ok), began.elapsed());
            }
            Ok(response)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_our_services_alone_are_counted() {
        for rule in vmmd_api::rule::METHOD_RULES {
            let counted = method(&format!("/{}", rule.method));
            assert_eq!(counted, rule.method.strip_prefix("vmmd.v1."), "{}", rule.method);
            assert!(counted.is_some());
        }
        for path in [
            "",
            "/",
            "/x.Y/Z",
            "/vmmd.v1.VmService/Nothing",
            "/grpc.health.v1.Health/Check",
            "/vmmd.v1.VmServiceX/GetVm",
            "vmmd.v1.VmService/GetVm",
        ] {
            assert_eq!(method(path), None, "{path}");
        }
    }

    #[test]
    fn a_call_is_counted_by_its_code_and_time() {
        let calls = Calls::default();
        calls.note("VmService/GetVm", Code::Ok, Duration::from_micros(100));
        calls.note("VmService/GetVm", Code::NotFound, Duration::from_secs(100));
        let mut families = Families::default();
        calls.add(&mut families);
        let text = families.text();
        for line in [
            "vmmd_rpcs_total{method=\"VmService/GetVm\",code=\"NOT_FOUND\"} 1.0",
            "vmmd_rpc_duration_seconds_bucket{le=\"0.001\",method=\"VmService/GetVm\"} 1",
            "vmmd_rpc_duration_seconds_bucket{le=\"60.0\",method=\"VmService/GetVm\"} 1",
            "vmmd_rpc_duration_seconds_bucket{le=\"+Inf\",method=\"VmService/GetVm\"} 2",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}

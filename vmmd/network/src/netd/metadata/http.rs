//! Requests and answers of HTTP/1.1 (RFC 9112), as strict as clients of a metadata service allow. A
//! connection has one request, without a body.

use std::{fmt::Write as _, time::Duration};

use super::ADDRESS;

/// Longest request in bytes.
pub const MAX_HEAD: usize = 8 << 10;
/// Most fields of a request.
const MAX_FIELDS: usize = 32;
/// Longest path in bytes.
const MAX_PATH: usize = 256;

/// Method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Head,
    Put,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub method: Method,
    /// Printable ASCII, begins with `/`.
    pub path: String,
    /// Token of the session, if the request has one.
    pub token: Option<String>,
    /// Requested life of a new token in seconds, if it is a number.
    pub ttl: Option<u64>,
    /// It has a field of a proxy.
    pub is_forwarded: bool,
}

/// Result of parsing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// More bytes are needed.
    Incomplete,
    /// Refused with this status.
    Refused(u16),
    Request(Request),
}

/// Parses the bytes of a connection.
pub fn parse(bytes: &[u8]) -> Outcome {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let length = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD => length,
        Ok(httparse::Status::Partial) if bytes.len() <= MAX_HEAD => return Outcome::Incomplete,
        Ok(_) | Err(httparse::Error::TooManyHeaders) => return Outcome::Refused(431),
        Err(_) => return Outcome::Refused(400),
    };
    match checked(&head) {
        // A body or another request.
        Ok(_) if length != bytes.len() => Outcome::Refused(400),
        Ok(request) => Outcome::Request(request),
        Err(status) => Outcome::Refused(status),
    }
}

fn checked(head: &httparse::Request<'_, '_>) -> Result<Request, u16> {
    let method = match head.method {
        Some("GET") => Method::Get,
        Some("HEAD") => Method::Head,
        Some("PUT") => Method::Put,
        _ => return Err(405),
    };
    let path = head.path.unwrap_or_default();
    if path.len() > MAX_PATH {
        return Err(414);
    }
    if !path.starts_with('/') || !path.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(400);
    }
    // The value of a field that may be there once.
    let field = |name: &str| -> Result<Option<&str>, u16> {
        let mut all = head.headers.iter();
        let is_named = |field: &&httparse::Header<'_>| field.name.eq_ignore_ascii_case(name);
        let first = all.find(is_named);
        let value = first.map(|field| std::str::from_utf8(field.value)).transpose();
        match (value, all.any(|field| is_named(&field))) {
            (Ok(value), false) => Ok(value.map(str::trim)),
            _ => Err(400),
        }
    };
    // A page of another name must not read the service through a browser in the guest.
    let own = ADDRESS.to_string();
    let is_own = |host: &str| host == own || host.strip_suffix(":80") == Some(&own);
    match field("host")? {
        Some(host) if is_own(host) => {}
        None if head.version == Some(0) => {}
        _ => return Err(400),
    }
    if field("transfer-encoding")?.is_some() || field("content-length")?.is_some_and(|length| length != "0") {
        return Err(413);
    }
    Ok(Request {
        method,
        path: path.to_owned(),
        token: field("x-aws-ec2-metadata-token")?.map(str::to_owned),
        ttl: field("x-aws-ec2-metadata-token-ttl-seconds")?.and_then(|seconds| seconds.parse().ok()),
        is_forwarded: ["x-forwarded-for", "forwarded", "via"].iter().any(|name| {
            head.headers
                .iter()
                .any(|field| field.name.eq_ignore_ascii_case(name))
        }),
    })
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    status: u16,
    body: Vec<u8>,
    /// Life of the token in the body.
    ttl: Option<Duration>,
}

impl Response {
    /// An answer without content.
    pub fn empty(status: u16) -> Self {
        Self {
            status,
            body: Vec::new(),
            ttl: None,
        }
    }

    /// A document.
    pub fn content(body: Vec<u8>) -> Self {
        Self {
            body,
            ..Self::empty(200)
        }
    }

    /// A new token.
    pub fn token(token: String, ttl: Duration) -> Self {
        Self {
            ttl: Some(ttl),
            ..Self::content(token.into_bytes())
        }
    }

    /// The bytes of the answer, without its content for the method HEAD.
    pub fn bytes(&self, is_head: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            413 => "Content Too Large",
            414 => "URI Too Long",
            _ => "Request Header Fields Too Large",
        };
        let mut head = format!(
            "HTTP/1.1 {} {reason}\r\nServer: vmmd\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nConnection: close\r\n",
            self.status,
            self.body.len()
        );
        if self.status == 405 {
            head.push_str("Allow: GET, HEAD\r\n");
        }
        if let Some(ttl) = self.ttl {
            let _ = write!(
                head,
                "X-aws-ec2-metadata-token-ttl-seconds: {}\r\n",
                ttl.as_secs()
            );
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        if !is_head {
            bytes.extend(&self.body);
        }
        bytes
    }
}

//! The server's errors: the `Status` object of the Kubernetes API.

use serde_json::{Value, json};

use super::kinds::Kind;

pub(crate) type Outcome<T> = Result<T, Failure>;

/// An error with kube-apiserver's words and code.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: u16,
    reason: &'static str,
    message: String,
    details: Value,
    /// In seconds; also sent as the header `Retry-After`.
    pub(crate) retry_after: Option<u32>,
}

impl Failure {
    pub(crate) fn new(code: u16, message: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason(code),
            message: message.into(),
            details: json!({}),
            retry_after: None,
        }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self {
            details: Value::Null,
            ..Self::new(400, message)
        }
    }

    /// Returns an error without a reason.
    pub(crate) fn unexplained(message: impl Into<String>) -> Self {
        Self {
            details: Value::Null,
            reason: "",
            ..Self::new(500, message)
        }
    }

    pub(crate) fn unauthorized() -> Self {
        Self {
            details: Value::Null,
            ..Self::new(401, "Unauthorized")
        }
    }

    pub(crate) fn no_such_path() -> Self {
        Self::new(404, "the server could not find the requested resource")
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::new(
            405,
            "the server does not allow this method on the requested resource",
        )
    }

    pub(crate) fn not_found(kind: &Kind, name: &str) -> Self {
        Self::new(404, format!("{} \"{name}\" not found", kind.resource())).about(kind, name)
    }

    pub(crate) fn already_exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", kind.resource());
        Self {
            reason: "AlreadyExists",
            ..Self::new(409, message).about(kind, name)
        }
    }

    pub(crate) fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": {why}",
            kind.resource()
        );
        Self::new(409, message).about(kind, name)
    }

    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self {
            reason: "Expired",
            ..Self::new(410, message)
        }
    }

    pub(crate) fn invalid(
        kind: &str,
        group: &str,
        name: &str,
        path: &str,
        cause: Cause,
        message: &str,
    ) -> Self {
        let message = if message.is_empty() {
            cause.words().to_owned()
        } else {
            format!("{}: {message}", cause.words())
        };
        let causes = json!([{"reason": cause.reason(), "message": message, "field": path}]);
        let mut details = json!({"causes": causes});
        for (field, value) in [("name", name), ("kind", kind), ("group", group)] {
            if !value.is_empty() {
                details[field] = json!(value);
            }
        }
        let qualified = if group.is_empty() {
            kind.to_owned()
        } else {
            format!("{kind}.{group}")
        };
        Self {
            details,
            ..Self::new(
                422,
                format!("{qualified} \"{name}\" is invalid: {path}: {message}"),
            )
        }
    }

    pub(crate) fn precondition(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": {why}",
            kind.kind
        );
        Self {
            details: json!({"name": name, "kind": kind.kind}),
            ..Self::new(409, message)
        }
    }

    pub(crate) fn version_too_large(asked: u64, now: u64) -> Self {
        let causes =
            json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]);
        let message = format!("Timeout: Too large resource version: {asked}, current: {now}");
        Self {
            details: json!({"causes": causes}),
            ..Self::new(504, message).retry_after(1)
        }
    }

    pub(crate) fn retry_after(self, seconds: u32) -> Self {
        Self {
            retry_after: Some(seconds),
            ..self
        }
    }

    pub(crate) fn status(&self) -> Value {
        let mut details = self.details.clone();
        if let Some(seconds) = self.retry_after {
            details["retryAfterSeconds"] = json!(seconds);
        }
        let mut status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code});
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if !details.is_null() {
            status["details"] = details;
        }
        status
    }

    fn about(self, kind: &Kind, name: &str) -> Self {
        let mut details = json!({"name": name, "kind": kind.plural});
        if !kind.group.is_empty() {
            details["group"] = json!(kind.group);
        }
        Self { details, ..self }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Cause {
    Invalid,
    Required,
    Forbidden,
    NotSupported,
}

impl Cause {
    fn words(self) -> &'static str {
        match self {
            Self::Invalid => "Invalid value",
            Self::Required => "Required value",
            Self::Forbidden => "Forbidden",
            Self::NotSupported => "Unsupported value",
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Invalid => "FieldValueInvalid",
            Self::Required => "FieldValueRequired",
            Self::Forbidden => "FieldValueForbidden",
            Self::NotSupported => "FieldValueNotSupported",
        }
    }
}

fn reason(code: u16) -> &'static str {
    match code {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        405 => "MethodNotAllowed",
        406 => "NotAcceptable",
        409 => "Conflict",
        410 => "Gone",
        415 => "UnsupportedMediaType",
        422 => "Invalid",
        429 => "TooManyRequests",
        500 => "InternalError",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        _ => "",
    }
}

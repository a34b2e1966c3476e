//! Probes of a VM, as `--probe` of `create vm` and `run` describes them.

use vmmd_api::v1::{self, probe::Check};

use super::keys::{self, number, usage};
use crate::failure::Result;

const KEYS: &str =
    "startup=, readiness= or liveness= first; then delay=, period=, timeout=, successes=, failures=";

/// The probes of all flags; `None` without any.
pub fn from_flags(flags: &[String]) -> Result<Option<v1::ProbesSpec>> {
    if flags.is_empty() {
        return Ok(None);
    }
    let mut probes = v1::ProbesSpec::default();
    for flag in flags {
        let mut probe = v1::Probe::default();
        let mut kind = String::new();
        keys::each("--probe", flag, KEYS, |key, value| {
            let value = value.unwrap_or_default();
            match key {
                "startup" | "readiness" | "liveness" if kind.is_empty() => {
                    key.clone_into(&mut kind);
                    probe.check = Some(check(value)?);
                }
                "delay" => probe.initial_delay_seconds = number(value)?,
                "period" => probe.period_seconds = number(value)?,
                "timeout" => probe.timeout_seconds = number(value)?,
                "successes" => probe.success_threshold = number(value)?,
                "failures" => probe.failure_threshold = number(value)?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        let place = match kind.as_str() {
            "startup" => &mut probes.startup,
            "readiness" => &mut probes.readiness,
            "liveness" => &mut probes.liveness,
            _ => {
                let message = format!("--probe {flag}: must have startup=, readiness= or liveness=");
                return Err(usage(message));
            }
        };
        if place.replace(probe).is_some() {
            return Err(usage(format!("--probe {flag}: there is a {kind} probe already")));
        }
    }
    Ok(Some(probes))
}

/// The check of `tcp:PORT`, `http:PORT[/PATH]`, `https:PORT[/PATH]`, `exec:COMMAND`, `agent` or `notify`.
fn check(text: &str) -> Result<Check, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    Ok(match name {
        "tcp" => Check::Tcp(v1::TcpCheck {
            port: number(rest)?,
            ..v1::TcpCheck::default()
        }),
        "http" | "https" => {
            let at = rest.find('/').unwrap_or(rest.len());
            let (port, path) = rest.split_at(at);
            Check::Http(v1::HttpCheck {
                port: number(port)?,
                path: path.to_owned(),
                tls: name == "https",
                ..v1::HttpCheck::default()
            })
        }
        "exec" => Check::Exec(v1::ExecCheck {
            command: rest.split_whitespace().map(str::to_owned).collect(),
        }),
        "agent" if rest.is_empty() => Check::Agent(v1::AgentCheck {}),
        "notify" if rest.is_empty() => Check::Notify(v1::NotifyCheck {}),
        _ => {
            return Err(
                "must be tcp:PORT, http:PORT/PATH, https:PORT/PATH, exec:COMMAND, agent or notify".to_owned(),
            );
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &[&str]) -> Result<Option<v1::ProbesSpec>> {
        let flags: Vec<_> = flags.iter().map(ToString::to_string).collect();
        from_flags(&flags)
    }

    #[test]
    fn flags_are_probes() {
        let flags = [
            "startup=tcp:22,period=5,failures=60",
            "readiness=https:443/healthz?a=b",
            "liveness=exec:systemctl is-active nginx,delay=9",
        ];
        let probes = serde_json::to_value(parse(&flags).unwrap()).unwrap();
        let expected = serde_json::json!({
            "startup": {"tcp": {"port": 22}, "periodSeconds": 5, "failureThreshold": 60},
            "readiness": {"http": {"port": 443, "path": "/healthz?a=b", "tls": true}},
            "liveness": {"exec": {"command": ["systemctl", "is-active", "nginx"]}, "initialDelaySeconds": 9},
        });
        assert_eq!(probes, expected);
        let notify = parse(&["readiness=notify,failures=30"]).unwrap();
        let notify = serde_json::to_value(notify).unwrap();
        assert_eq!(
            notify["readiness"],
            serde_json::json!({"notify": {}, "failureThreshold": 30})
        );
        assert_eq!(parse(&[]).unwrap(), None);
    }

    #[test]
    fn mistakes_are_named() {
        for (flags, words) in [
            (&["period=5"][..], "must have startup="),
            (&["readiness=ping:7"], "must be tcp:PORT"),
            (&["readiness=tcp:ssh"], "whole number"),
            (&["liveness=agent", "liveness=agent"], "already"),
            (&["liveness=agent,often=1"], "often"),
        ] {
            let error = parse(flags).unwrap_err().to_string();
            assert!(error.contains(words), "{flags:?}: {error}");
        }
    }
}

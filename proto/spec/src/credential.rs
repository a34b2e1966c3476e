//! Credentials for systemd in a guest, as OEM strings of its SMBIOS tables (systemd.system-credentials(7)).

use base64::{Engine as _, engine::general_purpose::STANDARD};
use vmmd_api::v1;

use super::{
    Violations,
    smbios::{MAX_OEM_BYTES, MAX_OEM_STRINGS, OemString, fit},
    vm::unique,
};

/// Longest name in bytes (systemd: `FDNAME_MAX`).
pub const MAX_NAME: usize = 255;

/// Whether systemd accepts a name, and an OEM string can have it: a file name of printable ASCII without `:` and `=`.
pub fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| (b' '..0x7f).contains(&byte) && !b"/:=".contains(&byte);
    !name.is_empty() && name.len() <= MAX_NAME && name != "." && name != ".." && name.bytes().all(allowed)
}

/// The content as the guest gets it.
///
/// # Errors
///
/// It is given twice, is not base64, or is a text with NUL.
pub fn content(wire: &v1::Credential) -> Result<Vec<u8>, &'static str> {
    match (wire.value.as_str(), wire.value_base64.as_str()) {
        (text, "") if text.contains('\0') => Err("must have no NUL: give the content as `valueBase64`"),
        (text, "") => Ok(text.as_bytes().to_vec()),
        ("", coded) => {
            let coded: String = coded.split_ascii_whitespace().collect();
            let decoded = STANDARD.decode(coded);
            decoded.map_err(|_| "must be base64, as `base64` prints it, in `valueBase64`")
        }
        _ => Err("must be left out with `valueBase64`"),
    }
}

/// Checks credentials and makes their OEM strings.
pub(super) fn oem_strings(found: &mut Violations, wires: &[v1::Credential]) -> Vec<OemString> {
    let field = "spec.credentials";
    if wires.len() > MAX_OEM_STRINGS {
        found.add(
            field,
            format_args!("at most {MAX_OEM_STRINGS}, are {}", wires.len()),
        );
        return Vec::new();
    }
    unique(found, field, "name", wires.iter().map(|wire| wire.name.as_str()));
    let mut strings = Vec::new();
    for (index, wire) in wires.iter().enumerate() {
        if !is_name(&wire.name) {
            let wanted = "must have 1 to 255 printable ASCII characters without '/', ':' and '=', and not be \".\" or \"..\"";
            found.add(format_args!("{field}[{index}].name"), wanted);
            continue;
        }
        let content = match content(wire) {
            Ok(content) => content,
            Err(problem) => {
                found.add(format_args!("{field}[{index}].value"), problem);
                continue;
            }
        };
        let name = &wire.name;
        let text = match wire.value_base64.is_empty() {
            true => format!("io.systemd.credential:{name}={}", wire.value),
            false => format!("io.systemd.credential.binary:{name}={}", STANDARD.encode(content)),
        };
        strings.extend(OemString::new(text));
    }
    if !fit(&strings) {
        let most =
            format_args!("together must have at most {MAX_OEM_BYTES} bytes in the form of the SMBIOS tables");
        found.add(field, most);
    }
    strings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credential(name: &str, value: &str, value_base64: &str) -> v1::Credential {
        v1::Credential {
            name: name.into(),
            value: value.into(),
            value_base64: value_base64.into(),
            ..Default::default()
        }
    }

    fn fields(wires: &[v1::Credential]) -> Vec<String> {
        let mut found = Violations::default();
        oem_strings(&mut found, wires);
        found.0.into_iter().map(|violation| violation.field).collect()
    }

    #[test]
    fn names_are_those_that_systemd_accepts() {
        for right in [
            "a",
            "ssh.authorized_keys.root",
            "getty.ttys serial",
            "...",
            &"x".repeat(255),
        ] {
            assert!(is_name(right), "{right}");
        }
        for wrong in [
            "",
            ".",
            "..",
            "a/b",
            "a:b",
            "a=b",
            "ä",
            "a\n",
            "a\x7f",
            &"x".repeat(256),
        ] {
            assert!(!is_name(wrong), "{wrong}");
        }
    }

    #[test]
    fn contents_become_oem_strings_that_hide_them_in_logs() {
        let mut found = Violations::default();
        let wires = [
            credential("a", "one\ntwo=2", ""),
            credential("b", "", "AAEC\n/w=="),
            credential("c", "", ""),
        ];
        let strings = oem_strings(&mut found, &wires);
        assert!(found.0.is_empty());
        let texts: Vec<_> = strings.iter().map(OemString::as_str).collect();
        assert_eq!(
            texts,
            [
                "io.systemd.credential:a=one\ntwo=2",
                "io.systemd.credential.binary:b=AAEC/w==",
                "io.systemd.credential:c=",
            ]
        );
        let logged = format!("{strings:?}");
        assert!(
            logged.contains("io.systemd.credential:a=…") && !logged.contains("two"),
            "{logged}"
        );
    }

    #[test]
    fn wrong_credentials_are_refused_by_field() {
        for (wires, field) in [
            (vec![credential("a/b", "x", "")], "spec.credentials[0].name"),
            (vec![credential("a", "\0", "")], "spec.credentials[0].value"),
            (vec![credential("a", "x", "eA==")], "spec.credentials[0].value"),
            (
                vec![credential("a", "", "no base64!")],
                "spec.credentials[0].value",
            ),
            (
                vec![credential("a", "x", ""), credential("a", "y", "")],
                "spec.credentials",
            ),
            (
                vec![credential("a", &"x".repeat(MAX_OEM_BYTES), "")],
                "spec.credentials",
            ),
            (
                vec![credential("a", "", ""); MAX_OEM_STRINGS + 1],
                "spec.credentials",
            ),
        ] {
            assert_eq!(fields(&wires), [field]);
        }
    }
}

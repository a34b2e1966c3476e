//! Roles, and how a certificate has one.

use std::fmt;

/// What somebody is to this node. Viewer, operator and admin contain each other in this order; a peer is apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Sees everything but consoles, changes nothing.
    Viewer,
    /// Runs what is there: starts, stops, consoles, limits, cordon and drain. Can't name a file of the node.
    Operator,
    /// Decides what there is. As good as root on the node: a manifest can name any of its files.
    Admin,
    /// The daemon of another node.
    Peer,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Viewer, Self::Operator, Self::Admin, Self::Peer];

    /// What comes before the role in the URI of a certificate (RFC 5280, 4.2.1.6, `uniformResourceIdentifier`).
    ///
    /// Why a URI in the subject alternative name, and not the subject's OU: it says for which program it is meant, so that no
    /// certificate that a company's CA has issued for something else has a role here by the name of a department; tools
    /// that issue certificates (cert-manager, SPIFFE, step-ca) set and restrict it; and the verifier reads it.
    pub const URI: &str = "vmmd://role/";

    /// As in the URI.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
            Self::Peer => "peer",
        }
    }

    /// The role with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }

    /// The role that a certificate with these URIs has: there must be exactly one role, and we must know it.
    pub fn of_uris<'a>(uris: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut roles = uris.filter_map(|uri| uri.strip_prefix(Self::URI));
        let role = Self::parse(roles.next()?);
        if roles.next().is_some() { None } else { role }
    }
}

impl From<proto::rule::Role> for Role {
    /// A rule always names a role; what names none is an admin's.
    fn from(role: proto::rule::Role) -> Self {
        match role {
            proto::rule::Role::Viewer => Self::Viewer,
            proto::rule::Role::Operator => Self::Operator,
            proto::rule::Role::Admin | proto::rule::Role::Unspecified => Self::Admin,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_has_a_role_when_it_names_exactly_one_that_we_know() {
        for (uris, role) in [
            (&["vmmd://role/viewer"][..], Some(Role::Viewer)),
            (&["spiffe://x/y", "vmmd://role/operator"], Some(Role::Operator)),
            (&["vmmd://role/admin"], Some(Role::Admin)),
            (&["vmmd://role/peer"], Some(Role::Peer)),
            (&[], None),
            (&["vmmd://role/Admin"], None),
            (&["vmmd://role/admin/"], None),
            (&["vmmd://role/"], None),
            (&["http://role/admin"], None),
            (&["vmmd://role/viewer", "vmmd://role/admin"], None),
            (&["vmmd://role/viewer", "vmmd://role/other"], None),
        ] {
            assert_eq!(Role::of_uris(uris.iter().copied()), role, "{uris:?}");
        }
    }
}

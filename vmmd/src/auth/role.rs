//! Roles, and how a certificate has one.

use std::fmt;

/// How much a viewer, an operator and an admin may: each rank contains the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// That of a viewer.
    Viewer,
    /// That of an operator.
    Operator,
    /// That of an admin.
    Admin,
}

/// Role of a caller on this node. Viewer, operator and admin have a [`Rank`]. A peer and an agent
/// have no rank: rules list each method that they may call. Roles have no order, which prevents a
/// comparison of these two with a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sees everything but consoles, changes nothing.
    Viewer,
    /// Operates existing VMs: start, stop, console, limits. Also cordon and drain. Cannot name a
    /// file of the node.
    Operator,
    /// Decides what there is. As good as root on the node: a manifest can name any of its files.
    Admin,
    /// The daemon of another node.
    Peer,
    /// The agent of a cluster, which places VMs on this node: makes, runs, moves and deletes them and their disks and images.
    Agent,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Viewer, Self::Operator, Self::Admin, Self::Peer, Self::Agent];

    /// Prefix of the role in the URI of a certificate (RFC 5280, 4.2.1.6,
    /// `uniformResourceIdentifier`).
    ///
    /// Reasons for a URI in the subject alternative name instead of the subject's OU:
    /// - The URI names the program. A certificate that a company's CA issued for another purpose
    ///   gets no role here from the name of a department.
    /// - Tools that issue certificates (cert-manager, SPIFFE, step-ca) set and restrict the URI.
    /// - The verifier reads it.
    pub const URI: &str = "vmmd://role/";

    /// As in the URI.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
            Self::Peer => "peer",
            Self::Agent => "agent",
        }
    }

    /// Its rank; `None` of a role that is apart.
    pub const fn rank(self) -> Option<Rank> {
        match self {
            Self::Viewer => Some(Rank::Viewer),
            Self::Operator => Some(Rank::Operator),
            Self::Admin => Some(Rank::Admin),
            Self::Peer | Self::Agent => None,
        }
    }

    /// Whether the role includes the permissions of the rank `least`.
    pub fn contains(self, least: Rank) -> bool {
        self.rank().is_some_and(|rank| rank >= least)
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

impl From<Rank> for Role {
    fn from(rank: Rank) -> Self {
        match rank {
            Rank::Viewer => Self::Viewer,
            Rank::Operator => Self::Operator,
            Rank::Admin => Self::Admin,
        }
    }
}

impl From<vmmd_api::rule::Role> for Rank {
    /// A rule always names a role; what names none is an admin's.
    fn from(role: vmmd_api::rule::Role) -> Self {
        match role {
            vmmd_api::rule::Role::Viewer => Self::Viewer,
            vmmd_api::rule::Role::Operator => Self::Operator,
            vmmd_api::rule::Role::Admin | vmmd_api::rule::Role::Unspecified => Self::Admin,
        }
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Role::from(*self).name())
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
    fn certificate_has_a_role_if_it_names_exactly_one() {
        for (uris, role) in [
            (&["vmmd://role/viewer"][..], Some(Role::Viewer)),
            (&["spiffe://x/y", "vmmd://role/operator"], Some(Role::Operator)),
            (&["vmmd://role/admin"], Some(Role::Admin)),
            (&["vmmd://role/peer"], Some(Role::Peer)),
            (&["vmmd://role/agent"], Some(Role::Agent)),
            (&["vmmd://role/agent", "vmmd://role/operator"], None),
            (&["vmmd://role/agents"], None),
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

    #[test]
    fn ranks_contain_each_other_and_peers_and_agents_none() {
        let ranks = [Rank::Viewer, Rank::Operator, Rank::Admin];
        for (role, contained) in [
            (Role::Viewer, &ranks[..1]),
            (Role::Operator, &ranks[..2]),
            (Role::Admin, &ranks[..]),
            (Role::Peer, &[]),
            (Role::Agent, &[]),
        ] {
            for rank in ranks {
                assert_eq!(role.contains(rank), contained.contains(&rank), "{role} {rank}");
            }
        }
        for role in Role::ALL {
            assert_eq!(Role::parse(role.name()), Some(role));
        }
    }
}

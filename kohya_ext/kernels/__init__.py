"""Operations that replace several passes over an activation by one."""
